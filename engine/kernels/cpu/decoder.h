// The decoder: one step of every sequence through every layer, as one program for the team.
#pragma once

#include <cstddef>

#include "attention_tasks.h"
#include "planned.h"

namespace penstock {

class Decoder {
   public:
    Decoder(Team& team, const Model& model)
        : team_(team),
          model_(model),
          ops_(model.ops, model.ops + model.num_ops),
          attention_(attention_over(static_cast<Type>(model.kv_type), has_latents(model))),
          tasks_(attention_.limits, team.size()),
          experts_(team),
          states_(model, team.size()) {
        with_type(model.embedding ? static_cast<Type>(model.embedding_type) : model.embedding_linear->type,
                  [&](auto* w) { embed_ = &Decoder::embed<std::remove_pointer_t<decltype(w)>>; });
        use_huge_pages(model.kv, static_cast<size_t>(model.kv_bytes));
        use_huge_pages(model.states, static_cast<size_t>(model.num_slots) * model.slot_floats * sizeof(float));
        int head_dim = 0, group = 0;
        for (const Op& op : ops_)
            if (op.shape) head_dim = std::max(head_dim, op.shape->head_dim), group = std::max(group, op.shape->group());
        for (int i = 0; i < team.size(); i++) attention_scratch_.emplace_back(head_dim, group, attention_.limits);
    }

    // From now on the program is another one.
    void set_program(const Op* ops, int num_ops) {
        ops_.assign(ops, ops + num_ops);
        capacity_ = 0;
    }

    // Writes the normed hidden states of the sample rows, [samples][hidden]. Of a head that goes on, the tokens follow
    // the sample rows of the step before, whose hidden states stand for the features: those in `out` where these are
    // normed.
    int run(const Step& step, float* out, bool goes_on = false) {
        step_ = step;
        out_ = out;
        goes_on_ = goes_on;
        const int status = check(model_, step, sequence_of_);
        if (status != kOk || step.tokens == 0) return status;
        reserve();
        plan();
        team_.run(this, phases_.data(), phases_.size());
        return kOk;
    }

    ExpertsWork& experts() { return experts_; }

   private:
    static bool has_latents(const Model& model) {
        return std::any_of(model.ops, model.ops + model.num_ops, [](const Op& op) { return op.shape && op.shape->latent; });
    }

    // Grows with the largest batch seen and never shrinks.
    void reserve() {
        const size_t rows = std::max(step_.tokens, step_.samples);
        ld_hidden_ = padded(model_.hidden);
        ld_qkv_ = padded(model_.qkv);
        ld_q_ = padded(model_.attended);
        ld_inner_ = padded_inner(model_.inner);
        if (rows <= capacity_) return;
        capacity_ = 0;
        hidden_ = allocate_hot<float>(rows * ld_hidden_);
        sampled_hidden_ = allocate_hot<float>(rows * ld_hidden_);
        int depth = 0, head_depth = 0;
        size_t heads = 0;  // times rows: those of products by head that are not read as they are
        ld_heads_ = ld_latents_ = ld_ranked_ = 0;
        std::vector<const Experts*> experts;
        for (const Op& op : ops_) {
            if (op.experts) experts.push_back(op.experts);
            if (op.linear) depth = std::max(depth, op.linear->depth);
            if (op.to == Stream::added) added_ = allocate_hot<float>(rows * ld_hidden_);
            if (op.to == Stream::per_layer) parts_ = allocate_hot<float>(rows * (ld_parts_ = padded(op.linear->n)));
            if (op.kind == OpKind::join) joined_ = allocate_hot<float>(rows * (ld_joined_ = 2 * ld_hidden_));
            if (op.kind == OpKind::keep && op.linear) {
                joined_ = allocate_hot<float>(rows * (ld_joined_ = padded(op.linear->k)));
                features_ = allocate_hot<float>(rows * padded(op.linear->n));
            }
            if (op.to == Stream::gates) ld_gates_ = std::max(ld_gates_, padded(op.linear->n));
            if (op.to == Stream::latents) ld_latents_ = std::max(ld_latents_, padded(op.linear->n));
            if (op.to == Stream::prepared && op.linear) ld_ranked_ = std::max(ld_ranked_, padded(op.linear->n));
            if (op.kind != OpKind::attend_latents) continue;
            ld_heads_ = std::max(ld_heads_, padded(op.shape->q_size()));
            for (const Linear* linear : {op.of_queries[0], op.of_latents[0]})
                if (linear->form != Form::f32) {
                    head_depth = std::max(head_depth, linear->depth);
                    heads = std::max<size_t>(heads, op.shape->num_heads);
                }
        }
        latents_ = allocate_hot<float>(rows * ld_latents_);
        ranked_ = allocate_hot<float>(rows * ld_ranked_);
        heads_ = allocate_hot<float>(rows * ld_heads_);
        if (heads > 0) head_input_.reserve(static_cast<int>(rows * heads), head_depth, Form::bf16);
        gates_ = allocate_hot<float>(rows * ld_gates_);
        input_.reserve(static_cast<int>(rows), depth);
        if (!experts.empty()) experts_.reserve(experts, static_cast<int>(rows), model_.hidden);
        qkv_ = allocate_hot<float>(rows * ld_qkv_);
        attended_ = allocate_hot<float>(rows * ld_q_);
        sampled_attended_ = allocate_hot<float>(rows * ld_q_);
        inner_ = allocate_hot<float>(round_up(static_cast<int>(rows), 32) * ld_inner_);
        capacity_ = rows;
    }

    // ---- the program -------------------------------------------------------------------------------------------

    void plan() {
        phases_.clear();
        products_.clear();
        norms_.clear();
        conversions_.clear();
        attentions_.clear();
        by_head_.clear();
        tasks_.start(step_, sequence_of_.data());
        experts_.start(&phases_);
        states_.start(step_);
        rows_ = step_.tokens;
        is_sampled_ = false;
        for (size_t i = 0; i < ops_.size() && rows_ > 0; i++) add_op(i);
    }

    void add_op(size_t index) {
        const Op& op = ops_[index];
        const uint32_t argument = static_cast<uint32_t>(index);
        const int chunks = divide_up(rows_, kRowsPerChunk);
        switch (op.kind) {
            case OpKind::embed: return add<&Decoder::run_embed>(argument, chunks, op.time);
            case OpKind::linear: return add_linear(index);
            case OpKind::experts: return add_experts(op);
            case OpKind::norm: return add_norm(op, stream(op.from), nullptr, stream(op.to));
            case OpKind::finish: return add_norm(op, stream(Stream::hidden), nullptr, {});
            case OpKind::attend: return add_attention(op, attention_step(op));
            case OpKind::attend_latents: return add_latents(op);
            case OpKind::recur: return add_states(op);
            case OpKind::tap: return add<&Decoder::run_tap>(static_cast<uint32_t>(op.adds), chunks, op.time);
            case OpKind::keep:
                if (op.linear)
                    add_product({op.linear, converted(floats(joined_.get(), ld_joined_), rows_, op.linear), rows_,
                                 features_.get(), padded(op.linear->n), Form::f32, nullptr, nullptr}, op.time);
                return add<&Decoder::run_keep>(argument, chunks, op.time);
            case OpKind::combine: return add<&Decoder::run_combine>(argument, chunks, op.time);
            case OpKind::join: return add<&Decoder::run_join>(argument, chunks, op.time);
            case OpKind::gather:
                rows_ = step_.samples;
                is_sampled_ = true;
                return add<&Decoder::run_gather>(0, divide_up(rows_, kRowsPerChunk), op.time);
        }
    }

    // Where rows lie, and how far apart.
    struct Place {
        float* rows;
        size_t ld;
    };

    Place stream(Stream which) const {
        switch (which) {
            case Stream::hidden: return {is_sampled_ ? sampled_hidden_.get() : hidden_.get(), ld_hidden_};
            case Stream::attended: return {is_sampled_ ? sampled_attended_.get() : attended_.get(), ld_q_};
            case Stream::qkv: return {qkv_.get(), ld_qkv_};
            case Stream::inner: return {inner_.get(), ld_inner_};
            case Stream::added: return {added_.get(), ld_hidden_};
            case Stream::per_layer: return {parts_.get(), ld_parts_};
            case Stream::gates: return {gates_.get(), ld_gates_};
            case Stream::latents: return {latents_.get(), ld_latents_};
            case Stream::prepared: return {ranked_.get(), ld_ranked_};
        }
        return {};
    }

    void add_linear(size_t index) {
        const Op& op = ops_[index];
        const Linear* linear = op.linear;
        const Place from = stream(op.from), to = stream(op.to);
        Activations x = floats(from.rows, from.ld);
        if (op.norm) add_norm(op, from, linear, {});
        if (op.part >= 0 || op.gates > 0 || (op.mixer && op.mixer->kind != MixerKind::conv)) {
            x = convert(x, rows_, linear, &op);
        } else if (op.norm || op.from == Stream::prepared) {
            x = input_.activations(*linear);
        } else {
            if (op.from == Stream::inner && inner_form_ == Form::bf16) x = {Form::bf16, from.rows, 2 * from.ld, nullptr};
            x = converted(x, rows_, linear);
        }
        Form form = Form::f32;
        if (op.to == Stream::inner) form = inner_form_ = form_of_inner(index);
        const float* residual = op.adds ? to.rows : nullptr;
        add_product({linear, x, rows_, to.rows, to.ld, form, residual, nullptr, op.gate, op.scale}, op.time);
    }

    void add_experts(const Op& op) {
        const Place from = stream(op.from), to = stream(op.to);
        experts_.plan({op.experts, rows_, model_.hidden, model_.eps, from.rows, from.ld, op.norm, op.is_centered != 0,
                       op.adds != 0, op.scale, op.after, to.rows, to.ld},
                      [&](uint32_t argument, int chunks, Kind kind) { add<&Decoder::run_experts>(argument, chunks, kind); });
    }

    void add_states(const Op& op) {
        const Place to = stream(Stream::attended);
        states_.plan({op.mixer, qkv_.get(), ld_qkv_, gates_.get(), ld_gates_, to.rows, to.ld},
                     [&](uint32_t argument, int chunks, Kind kind) { add<&Decoder::run_states>(argument, chunks, kind); });
    }

    void add_product(const Product& product, Kind kind) {
        const Cut by = cut(*product.linear, rows_, team_.size());
        if (!products_.empty()) products_.back().product.next = product.linear;
        products_.push_back({product, by});
        const uint32_t number = static_cast<uint32_t>(products_.size() - 1);
        add<&Decoder::run_product>(number, static_cast<int>(by.chunks()), kind);
    }

    // What reads the rows next may take them as they are written.
    Form form_of_inner(size_t index) const {
        for (size_t i = index + 1; i < ops_.size(); i++)
            if (ops_[i].kind == OpKind::linear && ops_[i].from == Stream::inner) {
                const Linear* next = ops_[i].linear;
                return next->form == Form::bf16 && next->k == next->depth ? Form::bf16 : Form::f32;
            }
        return Form::f32;
    }

    void add_norm(const Op& op, Place from, const Linear* next, Place to) {
        const int width = op.from == Stream::prepared ? next->k : model_.hidden;
        norms_.push_back({from.rows, from.ld, width, &op, rows_, next, to.rows});
        const uint32_t number = static_cast<uint32_t>(norms_.size() - 1);
        add<&Decoder::run_norm>(number, divide_up(rows_, kRowsPerChunk), Kind::norm);
    }

    void add_attention(const Op& op, const AttentionStep& step) {
        const int number = place_tokens(op, step);
        add<&Decoder::run_attend>(number, static_cast<int>(attentions_[number].tasks->size()), Kind::attention);
    }

    // K maps queries between their rotation and attention, which leaves latents in their place; V maps these.
    void add_latents(const Op& op) {
        const Shape& shape = *op.shape;
        const Place queries = stream(Stream::qkv), latents = stream(Stream::latents), out = stream(Stream::attended);
        AttentionStep step = attention_step(op);
        step.qkv = step.out = heads_.get();
        step.ld = step.ldo = ld_heads_;
        step.queries = queries.rows, step.ld_queries = queries.ld;
        step.latents = latents.rows, step.ld_latents = latents.ld;
        const int number = place_tokens(op, step);
        const size_t query = shape.plain + shape.rotated(), d = shape.head_dim, value = op.of_latents[0]->n;
        add_heads({op.of_queries, shape.num_heads, queries.rows, queries.ld, query, heads_.get(), ld_heads_, d, rows_, {}},
                  Kind::qkv);
        add<&Decoder::run_attend>(number, static_cast<int>(attentions_[number].tasks->size()), Kind::attention);
        add_heads({op.of_latents, shape.num_heads, heads_.get(), ld_heads_, d, out.rows, out.ld, value, rows_, {}}, Kind::o);
    }

    void add_heads(PlannedHeads by, Kind kind) {
        const Linear& first = *by.linears[0];
        by.cut = cut(first, rows_, team_.size(), by.heads);
        by_head_.push_back(by);
        const uint32_t number = static_cast<uint32_t>(by_head_.size() - 1);
        if (first.form != Form::f32)
            add<&Decoder::run_convert_heads>(number, divide_up(rows_, kRowsPerChunk), Kind::prepare);
        add<&Decoder::run_heads>(number, by.heads * static_cast<int>(by.cut.chunks()), kind);
    }

    // The number of the attention whose queries, keys and values are put in their places.
    uint32_t place_tokens(const Op& op, const AttentionStep& step) {
        const Queries queries = is_sampled_     ? Queries::gathered
                                : op.is_sampled ? Queries::sampled
                                                : Queries::all;
        attentions_.push_back({step, &tasks_.of(step, queries), rows_});
        const uint32_t number = static_cast<uint32_t>(attentions_.size() - 1);
        add<&Decoder::run_place>(number, divide_up(rows_, rows_to_place(rows_)), Kind::place);
        return number;
    }

    // The rows in the form that a linear reads, by a phase of its own where they are not.
    Activations converted(const Activations& x, int rows, const Linear* next) {
        return x.form == next->form ? x : convert(x, rows, next);
    }

    Activations convert(const Activations& x, int rows, const Linear* next, const Op* through = nullptr) {
        conversions_.push_back({x.row<float>(0), x.stride / sizeof(float), rows, next, through, is_sampled_});
        const uint32_t index = static_cast<uint32_t>(conversions_.size() - 1);
        add<&Decoder::run_convert>(index, divide_up(rows, kRowsPerChunk), Kind::prepare);
        return input_.activations(*next);
    }

    template <void (Decoder::*Method)(uint32_t, int, int)>
    void add(uint32_t argument, int chunks, Kind kind) {
        const auto call = [](void* job, uint32_t arg, uint32_t chunk, int worker) {
            (static_cast<Decoder*>(job)->*Method)(arg, static_cast<int>(chunk), worker);
        };
        if (chunks > 0) phases_.push_back({call, argument, static_cast<uint32_t>(chunks), kind});
    }

    AttentionStep attention_step(const Op& op) {
        return {op.shape,
                tasks_.positions(is_sampled_),
                tasks_.rotary_positions(is_sampled_),
                step_.tables(op.table),
                static_cast<size_t>(step_.max_blocks),
                op.window,
                op.first,
                op.keys,
                op.values,
                static_cast<size_t>(op.stride),
                qkv_.get() + op.gates,
                ld_qkv_,
                stream(Stream::attended).rows,
                ld_q_,
                nullptr,
                0,
                nullptr,
                0};
    }

    size_t block_of(const int32_t* tables, int sequence, int position) const {
        return tables[static_cast<size_t>(sequence) * step_.max_blocks + position / kBlockTokens];
    }

    // Where a token of a sequence lies in a cache of rows, which has the blocks of the first table.
    size_t place_of(int sequence, int position) const {
        return block_of(step_.block_tables, sequence, position) * kBlockTokens + position % kBlockTokens;
    }

    // ---- what the phases do ------------------------------------------------------------------------------------

    template <class Function>
    static void for_rows(int chunk, int rows, Function function, int together = kRowsPerChunk) {
        for (int r = chunk * together; r < std::min(rows, (chunk + 1) * together); r++) function(r);
    }

    template <class W>
    void embed(int token, float* out) const {
        const int id = step_.token_ids[token];
        if (model_.embedding == nullptr) return model_.embedding_linear->unpack_row(id, out);
        const W* row = static_cast<const W*>(model_.embedding) + static_cast<size_t>(id) * model_.hidden;
        for (int i = 0; i < model_.hidden; i++) out[i] = to_float(row[i]);
    }

    void run_embed(uint32_t index, int chunk, int) {
        const float scale = ops_[index].scale;
        for_rows(chunk, step_.tokens, [&](int t) {
            float* row = hidden_.get() + t * ld_hidden_;
            (this->*embed_)(t, row);
            if (scale != 1.0f) penstock::multiply(row, model_.hidden, scale);
        });
    }

    void run_tap(uint32_t index, int chunk, int) {
        for_rows(chunk, step_.tokens, [&](int t) {
            float* out = joined_.get() + t * ld_joined_ + index * model_.hidden;
            std::memcpy(out, hidden_.get() + t * ld_hidden_, model_.hidden * sizeof(float));
        });
    }

    void run_keep(uint32_t index, int chunk, int worker) {
        const Op& op = ops_[index];
        const int width = op.linear ? op.linear->n : model_.hidden;
        for_rows(chunk, step_.tokens, [&](int t) {
            const float* row = op.linear ? features_.get() + t * padded(width)
                                         : normed(op, hidden_.get() + t * ld_hidden_, width, team_.scratch(worker));
            to_operands(row, width, width, static_cast<BFloat*>(op.rows) + place_of(sequence_of_[t], step_.positions[t]) * width);
        });
    }

    const float* normed(const Op& op, const float* x, int width, float* out) const {
        (op.is_centered ? layer_norm : rms_norm)(x, op.norm, width, model_.eps, out);
        return out;
    }

    void run_join(uint32_t index, int chunk, int) {
        const Op& op = ops_[index];
        const int width = model_.hidden;
        for_rows(chunk, step_.tokens, [&](int t) {
            float *row = hidden_.get() + t * ld_hidden_, *joined = joined_.get() + t * ld_joined_;
            rms_norm(row, op.norm, width, model_.eps, joined);
            read_features(op, t, row);
            rms_norm(row, op.rows_norm, width, model_.eps, joined + width);
            if (op.adds) std::memcpy(row, joined + width, width * sizeof(float));
            input_.convert(*op.linear, t, joined);
        });
    }

    // Those of the token before; zeros before the first.
    void read_features(const Op& op, int t, float* out) const {
        const int before = step_.positions[t] - 1, width = model_.hidden;
        const BFloat* features = static_cast<const BFloat*>(op.rows);
        if (goes_on_)
            std::memcpy(out, op.follows_norm ? out_ + static_cast<size_t>(t) * width : sampled_hidden_.get() + t * ld_hidden_,
                        width * sizeof(float));
        else if (before < 0)
            std::memset(out, 0, width * sizeof(float));
        else
            std::transform(features + place_of(sequence_of_[t], before) * width,
                           features + (place_of(sequence_of_[t], before) + 1) * width, out,
                           [](BFloat x) { return to_float(x); });
    }

    void run_norm(uint32_t index, int chunk, int worker) {
        const PlannedNorm& norm = norms_[index];
        const int width = norm.width;
        const bool is_output = !norm.next && !norm.to;
        for_rows(chunk, norm.rows, [&](int r) {
            float* out = is_output ? out_ + static_cast<size_t>(r) * width : team_.scratch(worker);
            normed(*norm.op, norm.x + r * norm.ldx, width, out);
            if (norm.next) input_.convert(*norm.next, r, out);
            if (norm.to) add_row(out, width, norm.op->scale, norm.op->after, norm.to + r * ld_hidden_);
        });
    }

    void run_convert(uint32_t index, int chunk, int worker) {
        const Conversion& by = conversions_[index];
        for_rows(chunk, by.rows, [&](int r) {
            const float* x = by.x + r * by.ldx;
            if (by.through) {
                float* out = team_.scratch(worker);
                let_row_through(*by.through, by.is_gathered ? step_.sample_rows[r] : r, x, out);
                x = out;
            }
            input_.convert(*by.next, r, x);
        });
    }

    void let_row_through(const Op& op, size_t token, const float* x, float* out) const {
        const int width = op.linear->k;
        const float* row = qkv_.get() + token * ld_qkv_;
        if (op.mixer) return let_through(*op.mixer, x, row, out);
        if (op.gates) return let_through_by_sigmoid(row, x, width, out);
        let_through(op.gate, x, parts_.get() + token * ld_parts_ + static_cast<size_t>(op.part) * width, width, out);
    }

    void run_combine(uint32_t index, int chunk, int) {
        for_rows(chunk, step_.tokens,
                 [&](int t) { combine(ops_[index], step_.token_ids[t], model_.eps, parts_.get() + t * ld_parts_); });
    }

    void run_product(uint32_t index, int chunk, int worker) {
        const PlannedProduct& planned = products_[index];
        multiply(planned.product, planned.cut, static_cast<uint32_t>(chunk), team_.scratch(worker));
    }

    void run_convert_heads(uint32_t index, int chunk, int) {
        const PlannedHeads& by = by_head_[index];
        for_rows(chunk, by.rows, [&](int r) {
            for (int head = 0; head < by.heads; head++)
                head_input_.convert(*by.linears[head], head * by.rows + r, by.x + r * by.ldx + head * by.x_apart);
        });
    }

    void run_heads(uint32_t index, int chunk, int worker) {
        const PlannedHeads& by = by_head_[index];
        const int chunks = static_cast<int>(by.cut.chunks()), head = chunk / chunks;
        const Linear& linear = *by.linears[head];
        const Activations x = linear.form == Form::f32 ? floats(by.x + head * by.x_apart, by.ldx)
                                                       : head_input_.activations(linear).from(head * by.rows);
        const Linear* next = head + 1 < by.heads ? by.linears[head + 1] : nullptr;
        const Product product{&linear, x, by.rows, by.out + head * by.out_apart, by.ldo, Form::f32, nullptr, next};
        multiply(product, by.cut, static_cast<uint32_t>(chunk % chunks), team_.scratch(worker));
    }

    void run_experts(uint32_t argument, int chunk, int worker) { experts_.run(argument, chunk, worker); }

    void run_states(uint32_t argument, int chunk, int worker) { states_.run(argument, chunk, worker); }

    void run_place(uint32_t index, int chunk, int) {
        const AttentionStep& step = attentions_[index].step;
        const int rows = attentions_[index].rows;
        const auto place = [&](int t) {
            const bool writes = !step.shape->shares;
            attention_.place(step, t, writes ? block_of(step.block_tables, sequence_of_[t], step.positions[t]) : 0);
        };
        for_rows(chunk, rows, place, rows_to_place(rows));
    }

    void run_attend(uint32_t index, int chunk, int worker) {
        attention_.attend(attentions_[index].step, (*attentions_[index].tasks)[chunk], attention_scratch_[worker]);
    }

    void run_gather(uint32_t, int chunk, int) {
        for_rows(chunk, step_.samples, [&](int r) {
            const size_t from = step_.sample_rows[r];
            std::memcpy(sampled_hidden_.get() + r * ld_hidden_, hidden_.get() + from * ld_hidden_,
                        model_.hidden * sizeof(float));
            std::memcpy(sampled_attended_.get() + r * ld_q_, attended_.get() + from * ld_q_,
                        model_.attended * sizeof(float));
        });
    }

    Team& team_;
    const Model model_;
    std::vector<Op> ops_;
    void (Decoder::*embed_)(int, float*) const;
    const Attention attention_;
    AttentionTasks tasks_;
    ExpertsWork experts_;
    StatesWork states_;
    bool goes_on_ = false;

    std::vector<AttentionScratch> attention_scratch_;  // per worker

    Step step_{};
    float* out_ = nullptr;
    std::vector<int> sequence_of_;
    std::vector<Phase> phases_;
    std::vector<PlannedNorm> norms_;
    std::vector<Conversion> conversions_;
    std::vector<PlannedProduct> products_;
    std::vector<PlannedAttention> attentions_;
    std::vector<PlannedHeads> by_head_;

    size_t capacity_ = 0;  // rows
    int rows_ = 0;  // of the operation that is planned
    bool is_sampled_ = false;
    Form inner_form_ = Form::f32;
    size_t ld_hidden_ = 0, ld_qkv_ = 0, ld_q_ = 0, ld_inner_ = 0, ld_parts_ = 0, ld_gates_ = 0, ld_joined_ = 0;
    size_t ld_heads_ = 0, ld_latents_ = 0, ld_ranked_ = 0;
    Prepared input_;       // of the product that comes next
    Prepared head_input_;  // of products by head, one head's rows after another's
    Buffer<float> heads_;  // queries after K, then what is attended to of latents: [heads][head_dim] in a row
    Buffer<float> latents_, ranked_;
    Buffer<float> hidden_, qkv_, attended_, inner_, added_, sampled_hidden_, sampled_attended_;
    Buffer<float> parts_, gates_;  // of all layers, and what one of them lets through of its own; or of a state
    Buffer<float> joined_, features_;  // what a head, or `keep`, reads side by side, and what the latter makes of it
};

}  // namespace penstock
