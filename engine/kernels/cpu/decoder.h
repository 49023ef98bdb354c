// The decoder: one step of every sequence through every layer, as one program for the team.
#pragma once

#include <cstddef>

#include "attention.h"
#include "product.h"

namespace penstock {

struct Layer {
    const float* attention_norm;
    const Linear* qkv;
    const float* q_norm;  // or null
    const float* k_norm;
    const Linear* o;
    const float* mlp_norm;
    const Linear* gate_up;
    const Linear* down;
    int32_t window;
};

// What a head (EAGLE-3) reads of its target's tokens: their fused hidden states, [blocks][kBlockTokens][width], in the
// blocks of the target's KV cache. The target writes them with its keys and values; `taps` of a target say from what.
struct Taps {
    static constexpr int kCount = 3;
    int32_t after[kCount];  // so many layers; fewer than the target has
    int32_t width;
    const Linear* fuse;  // reads them one after another
    BFloat* features;
};

// A head has one layer. The row of a token reads the norm of the token's embedding beside the norm of the features of
// the token before it, and these are its residual. The first token of a sequence has none before it: nobody sees it.
struct HeadInput {
    const float* norm;        // of the features; that of the embedding is the layer's attention_norm
    const BFloat* features;   // as wide as the head
    int32_t residual_is_normed;
};

struct Model {
    int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab, num_layers, max_position;
    float eps;
    int32_t embedding_type;
    const void* embedding;           // [vocab][hidden] in its own type, or null:
    const Linear* embedding_linear;  // its rows are the embedding
    const float* final_norm;
    const float* cos;
    const float* sin;
    int32_t kv_type;
    int32_t num_blocks;
    void* kv;  // [layers][2][blocks][bytes of a block]: see kv_layout.h
    const Layer* layers;
    const HeadInput* head;  // or null: an ordinary decoder
};

struct Step {
    const int32_t *token_ids, *positions, *query_starts, *context_lens, *block_tables, *sample_rows;
    int32_t tokens, sequences, max_blocks, samples;
};

enum Status : int {
    kOk = 0,
    kBadToken,
    kBadPosition,
    kBadBlock,
    kBadStarts,
    kBadSample,
    kNoMemory,
    kBadSlot,
};

constexpr int kRowsPerChunk = 8;  // of the cheap phases

// The same of the tokens whose keys and values are placed: the tokens of a block lie side by side in the same lines, so
// that a prompt's blocks go to one thread each.
inline int rows_to_place(int tokens) { return tokens < 8 * kBlockTokens ? kRowsPerChunk : kBlockTokens; }

// A row length of an odd number of cache lines, so that the rows of a tile do not fall into the same cache sets.
inline size_t padded(size_t n) { return ((n + 15) / 16 | 1) * 16; }

class Decoder {
   public:
    Decoder(Team& team, const Model& model)
        : team_(team), model_(model), layers_(model.layers, model.layers + model.num_layers) {
        shape_ = {model.num_heads, model.num_kv_heads, model.head_dim, model.eps, model.cos, model.sin};
        with_type(model.embedding ? static_cast<Type>(model.embedding_type) : model.embedding_linear->type,
                  [&](auto* w) { embed_ = &Decoder::embed<std::remove_pointer_t<decltype(w)>>; });
        attention_ = attention_over(static_cast<Type>(model.kv_type), shape_);
        use_huge_pages(model.kv, 2 * model.num_layers * half_of_layer());
        for (int i = 0; i < team.size(); i++) attention_scratch_.emplace_back(shape_, attention_.limits);
        if (model.head) head_ = *model.head;
    }

    // From now on every step writes the features of its tokens.
    void tap(const Taps& taps) {
        taps_ = taps;
        capacity_ = 0;
    }

    // Writes the normed hidden states of the sample rows, [samples][hidden]. Of a head that goes on, the tokens follow
    // the sample rows of the step before, whose hidden states stand for the features.
    int run(const Step& step, float* out, bool goes_on = false) {
        step_ = step;
        out_ = out;
        goes_on_ = goes_on;
        const int status = check();
        if (status != kOk || step.tokens == 0) return status;
        reserve();
        plan();
        team_.run(this, phases_.data(), phases_.size());
        return kOk;
    }

   private:
    // Bytes of the keys, or of the values, of one layer.
    size_t half_of_layer() const {
        return static_cast<size_t>(model_.num_blocks) * attention_.block_bytes;
    }

    int check() {
        const Step& s = step_;
        sequence_of_.resize(s.tokens);
        if (s.query_starts[0] != 0 || s.query_starts[s.sequences] != s.tokens) return kBadStarts;
        for (int i = 0; i < s.sequences; i++) {
            const int from = s.query_starts[i], to = s.query_starts[i + 1], context = s.context_lens[i];
            if (from < 0 || to < from || to > s.tokens) return kBadStarts;
            if (context < 0 || context > model_.max_position || context > s.max_blocks * kBlockTokens)
                return kBadPosition;
            for (int t = from; t < to; t++) {
                if (s.token_ids[t] < 0 || s.token_ids[t] >= model_.vocab) return kBadToken;
                if (s.positions[t] < 0 || s.positions[t] >= context) return kBadPosition;
                sequence_of_[t] = i;
            }
            const int32_t* table = s.block_tables + static_cast<size_t>(i) * s.max_blocks;
            for (int b = 0; b < divide_up(context, kBlockTokens); b++)
                if (table[b] < 0 || table[b] >= model_.num_blocks) return kBadBlock;
        }
        for (int r = 0; r < s.samples; r++)
            if (s.sample_rows[r] < 0 || s.sample_rows[r] >= s.tokens) return kBadSample;
        return kOk;
    }

    // Grows with the largest batch seen and never shrinks.
    void reserve() {
        const size_t rows = std::max(step_.tokens, step_.samples);
        ld_hidden_ = padded(model_.hidden);
        ld_qkv_ = padded(shape_.q_size() + 2 * shape_.kv_size());
        ld_q_ = padded(shape_.q_size());
        ld_mlp_ = padded(model_.intermediate);
        if (rows <= capacity_) return;
        capacity_ = 0;
        hidden_ = allocate_hot<float>(rows * ld_hidden_);
        sampled_hidden_ = allocate_hot<float>(rows * ld_hidden_);
        int depth = 0;
        for (const Layer& layer : layers_)
            for (const Linear* linear : {layer.qkv, layer.o, layer.gate_up, layer.down})
                depth = std::max(depth, linear->depth);
        if (is_head()) joined_ = allocate_hot<float>(rows * 2 * ld_hidden_);
        if (taps_.fuse) {
            depth = std::max(depth, taps_.fuse->depth);
            joined_ = allocate_hot<float>(rows * ld_taps());
            features_ = allocate_hot<float>(rows * padded(taps_.width));
        }
        input_.reserve(static_cast<int>(rows), depth);
        qkv_ = allocate_hot<float>(rows * ld_qkv_);
        attended_ = allocate_hot<float>(rows * ld_q_);
        sampled_attended_ = allocate_hot<float>(rows * ld_q_);
        mlp_ = allocate_hot<float>(round_up(static_cast<int>(rows), 32) * ld_mlp_);
        capacity_ = rows;
    }

    // ---- the program -------------------------------------------------------------------------------------------

    struct Norm {
        const float* x;
        const float* weight;
        int rows;
        const Linear* next;  // reads the rows in its form; or null:
        float* out;          // [rows][hidden]
    };

    struct Conversion {
        const float* x;
        size_t ldx;
        int rows;
        const Linear* next;
    };

    struct PlannedProduct {
        Product product;
        Cut cut;
    };

    struct PlannedAttention {
        AttentionStep step;
        const std::vector<Task>* tasks;
    };

    void plan() {
        phases_.clear();
        products_.clear();
        norms_.clear();
        conversions_.clear();
        attentions_.clear();
        const int tokens = step_.tokens, last = model_.num_layers - 1;
        plan_tasks();
        add<&Decoder::run_embed>(0, divide_up(tokens, kRowsPerChunk), Kind::embed);
        for (int i = 0; i <= last; i++) {
            const Layer& layer = layers_[i];
            const bool sampled = i == last;  // of the last layer only those rows are wanted
            if (taps_.fuse) add_taps(i, tokens);
            if (is_head())
                add<&Decoder::run_join>(0, divide_up(tokens, kRowsPerChunk), Kind::norm);
            else
                add_norm(hidden_.get(), layer.attention_norm, tokens, layer.qkv, nullptr);
            add_product(layer.qkv, input_.activations(layer.qkv->form), tokens, qkv_.get(), ld_qkv_, Kind::qkv);
            attentions_.push_back({attention_step(i), sampled ? &sampled_tasks_ : &tasks_});
            add<&Decoder::run_place>(i, divide_up(tokens, rows_to_place(tokens)), Kind::place);
            add<&Decoder::run_attend>(i, static_cast<int>(attentions_.back().tasks->size()), Kind::attention);
            if (!sampled) {
                add_block(layer, hidden_.get(), attended_.get(), tokens);
            } else if (step_.samples > 0) {
                add<&Decoder::run_gather>(0, divide_up(step_.samples, kRowsPerChunk), Kind::gather);
                add_block(layer, sampled_hidden_.get(), sampled_attended_.get(), step_.samples);
                add_norm(sampled_hidden_.get(), model_.final_norm, step_.samples, nullptr, out_);
            }
        }
    }

    void add_block(const Layer& layer, float* hidden, const float* attended, int rows) {
        const Activations context = converted(floats(attended, ld_q_), rows, layer.o);
        add_product(layer.o, context, rows, hidden, ld_hidden_, Kind::o, hidden);
        add_norm(hidden, layer.mlp_norm, rows, layer.gate_up, nullptr);
        Activations inner = floats(mlp_.get(), ld_mlp_);
        if (layer.down->form == Form::bf16 && layer.down->k == layer.down->depth)
            inner = {Form::bf16, mlp_.get(), 2 * ld_mlp_, nullptr};
        add_product(layer.gate_up, input_.activations(layer.gate_up->form), rows, mlp_.get(), ld_mlp_,
                    Kind::gate_up, nullptr, inner.form);
        add_product(layer.down, converted(inner, rows, layer.down), rows, hidden, ld_hidden_, Kind::down, hidden);
    }

    void add_taps(int layer, int rows) {
        const int chunks = divide_up(rows, kRowsPerChunk);
        for (int i = 0; i < Taps::kCount; i++)
            if (taps_.after[i] == layer) add<&Decoder::run_tap>(i, chunks, Kind::prepare);
        if (*std::max_element(taps_.after, taps_.after + Taps::kCount) != layer) return;
        const Activations joined = converted(floats(joined_.get(), ld_taps()), rows, taps_.fuse);
        add_product(taps_.fuse, joined, rows, features_.get(), padded(taps_.width), Kind::prepare);
        add<&Decoder::run_keep>(0, chunks, Kind::prepare);
    }

    void add_norm(const float* x, const float* weight, int rows, const Linear* next, float* out) {
        norms_.push_back({x, weight, rows, next, out});
        const uint32_t index = static_cast<uint32_t>(norms_.size() - 1);
        add<&Decoder::run_norm>(index, divide_up(rows, kRowsPerChunk), Kind::norm);
    }

    // The rows in the form that a linear reads, by a phase of its own where they are not.
    Activations converted(const Activations& x, int rows, const Linear* next) {
        if (x.form == next->form) return x;
        conversions_.push_back({x.row<float>(0), x.stride / sizeof(float), rows, next});
        const uint32_t index = static_cast<uint32_t>(conversions_.size() - 1);
        add<&Decoder::run_convert>(index, divide_up(rows, kRowsPerChunk), Kind::prepare);
        return input_.activations(next->form);
    }

    void add_product(const Linear* linear, const Activations& x, int rows, void* out, size_t ldo,
                     Kind kind, const float* residual = nullptr, Form out_form = Form::f32) {
        const Cut by = cut(*linear, rows, team_.size());
        products_.push_back({{linear, x, rows, out, ldo, out_form, residual, nullptr}, by});
        if (products_.size() > 1) products_[products_.size() - 2].product.next = linear;
        const uint32_t index = static_cast<uint32_t>(products_.size() - 1);
        add<&Decoder::run_product>(index, static_cast<int>(by.chunks()), kind);
    }

    template <void (Decoder::*Method)(uint32_t, int, int)>
    void add(uint32_t argument, int chunks, Kind kind) {
        const auto call = [](void* job, uint32_t arg, uint32_t chunk, int worker) {
            (static_cast<Decoder*>(job)->*Method)(arg, static_cast<int>(chunk), worker);
        };
        if (chunks > 0) phases_.push_back({call, argument, static_cast<uint32_t>(chunks), kind});
    }

    void plan_tasks() {
        tasks_.clear();
        sampled_tasks_.clear();
        for (int i = 0; i < step_.sequences; i++)
            add_tasks(tasks_, i, step_.query_starts[i], step_.query_starts[i + 1]);
        for (int r = 0; r < step_.samples;) {
            const int token = step_.sample_rows[r], sequence = sequence_of_[token];
            int run = 1;  // neighbours of one sequence share their tasks
            while (r + run < step_.samples && step_.sample_rows[r + run] == token + run &&
                   sequence_of_[token + run] == sequence)
                run++;
            add_tasks(sampled_tasks_, sequence, token, token + run);
            r += run;
        }
        const auto dearer = [](const Task& a, const Task& b) { return a.cost > b.cost; };
        std::stable_sort(tasks_.begin(), tasks_.end(), dearer);
        std::stable_sort(sampled_tasks_.begin(), sampled_tasks_.end(), dearer);
    }

    // With work enough for everyone, a task takes as many heads as it has rows for.
    void add_tasks(std::vector<Task>& tasks, int sequence, int from, int to) {
        const int most = attention_.limits.tokens_per_task(shape_), heads = shape_.num_kv_heads;
        for (int t = from; t < to; t += most) {
            const int tokens = std::min(most, to - t);
            const bool scarce = step_.sequences < 4 * team_.size();
            const int together = scarce ? 1 : attention_.limits.heads_per_task(shape_, tokens);
            for (int h = 0; h < heads; h += together) {
                const int some = std::min(together, heads - h);
                const int64_t cost = int64_t(tokens) * some * (step_.positions[t + tokens - 1] + 1);
                tasks.push_back({sequence, t, tokens, h, some, cost});
            }
        }
    }

    AttentionStep attention_step(int layer) {
        const size_t half = half_of_layer();
        char* keys = static_cast<char*>(model_.kv) + 2 * layer * half;
        return {&shape_,      step_.positions, step_.block_tables, static_cast<size_t>(step_.max_blocks),
                layers_[layer].window, is_head(), keys, keys + half, qkv_.get(),
                ld_qkv_,      attended_.get(), ld_q_};
    }

    bool is_head() const { return head_.norm != nullptr; }

    size_t ld_taps() const { return padded(Taps::kCount * model_.hidden); }

    // Where a token of a sequence lies in a cache of rows.
    size_t place_of(int sequence, int position) const {
        const int32_t* table = step_.block_tables + static_cast<size_t>(sequence) * step_.max_blocks;
        return static_cast<size_t>(table[position / kBlockTokens]) * kBlockTokens + position % kBlockTokens;
    }

    // ---- what the phases do ------------------------------------------------------------------------------------

    template <class Function>
    static void for_rows(int chunk, int rows, Function function, int together = kRowsPerChunk) {
        for (int r = chunk * together; r < std::min(rows, (chunk + 1) * together); r++) function(r);
    }

    template <class W>
    void embed(int token, float* out) const {
        const int id = step_.token_ids[token];
        const Linear* linear = model_.embedding_linear;
        if (model_.embedding == nullptr && is_integer(linear->type)) return linear->unpack_integers(id, out);
        if (model_.embedding == nullptr && is_coded(linear->type)) return linear->unpack_coded(id, out);
        if (model_.embedding == nullptr) return model_.embedding_linear->unpack_row<W>(id, out);
        const W* row = static_cast<const W*>(model_.embedding) + static_cast<size_t>(id) * model_.hidden;
        for (int i = 0; i < model_.hidden; i++) out[i] = to_float(row[i]);
    }

    void run_embed(uint32_t, int chunk, int) {
        for_rows(chunk, step_.tokens, [&](int t) { (this->*embed_)(t, hidden_.get() + t * ld_hidden_); });
    }

    void run_tap(uint32_t index, int chunk, int) {
        for_rows(chunk, step_.tokens, [&](int t) {
            float* out = joined_.get() + t * ld_taps() + index * model_.hidden;
            std::memcpy(out, hidden_.get() + t * ld_hidden_, model_.hidden * sizeof(float));
        });
    }

    void run_keep(uint32_t, int chunk, int) {
        for_rows(chunk, step_.tokens, [&](int t) {
            BFloat* out = taps_.features + place_of(sequence_of_[t], step_.positions[t]) * taps_.width;
            to_operands(features_.get() + t * padded(taps_.width), taps_.width, taps_.width, out);
        });
    }

    // A head's input: the rows of embeddings become its residual.
    void run_join(uint32_t, int chunk, int) {
        const int width = model_.hidden;
        for_rows(chunk, step_.tokens, [&](int t) {
            float *row = hidden_.get() + t * ld_hidden_, *joined = joined_.get() + t * 2 * ld_hidden_;
            rms_norm(row, layers_[0].attention_norm, width, model_.eps, joined);
            read_features(t, row);
            rms_norm(row, head_.norm, width, model_.eps, joined + width);
            if (head_.residual_is_normed) std::memcpy(row, joined + width, width * sizeof(float));
            input_.convert(*layers_[0].qkv, t, joined);
        });
    }

    // Those of the token before; zeros before the first.
    void read_features(int t, float* out) const {
        const int before = step_.positions[t] - 1, width = model_.hidden;
        if (goes_on_)
            std::memcpy(out, sampled_hidden_.get() + t * ld_hidden_, width * sizeof(float));
        else if (before < 0)
            std::memset(out, 0, width * sizeof(float));
        else
            std::transform(head_.features + place_of(sequence_of_[t], before) * width,
                           head_.features + (place_of(sequence_of_[t], before) + 1) * width, out,
                           [](BFloat x) { return to_float(x); });
    }

    void run_norm(uint32_t index, int chunk, int worker) {
        const Norm& norm = norms_[index];
        float* normed = team_.scratch(worker);
        for_rows(chunk, norm.rows, [&](int r) {
            float* out = norm.next ? normed : norm.out + static_cast<size_t>(r) * model_.hidden;
            rms_norm(norm.x + r * ld_hidden_, norm.weight, model_.hidden, model_.eps, out);
            if (norm.next) input_.convert(*norm.next, r, out);
        });
    }

    void run_convert(uint32_t index, int chunk, int) {
        const Conversion& conversion = conversions_[index];
        for_rows(chunk, conversion.rows,
                 [&](int r) { input_.convert(*conversion.next, r, conversion.x + r * conversion.ldx); });
    }

    void run_product(uint32_t index, int chunk, int worker) {
        const PlannedProduct& planned = products_[index];
        multiply(planned.product, planned.cut, static_cast<uint32_t>(chunk), team_.scratch(worker));
    }

    void run_place(uint32_t index, int chunk, int) {
        const Layer& layer = layers_[index];
        const auto place = [&](int t) {
            const int block = static_cast<int>(place_of(sequence_of_[t], step_.positions[t]) / kBlockTokens);
            attention_.place(attentions_[index].step, layer.q_norm, layer.k_norm, t, block);
        };
        for_rows(chunk, step_.tokens, place, rows_to_place(step_.tokens));
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
                        shape_.q_size() * sizeof(float));
        });
    }

    Team& team_;
    const Model model_;
    const std::vector<Layer> layers_;
    Shape shape_;
    void (Decoder::*embed_)(int, float*) const;
    Attention attention_;
    Taps taps_{};
    HeadInput head_{};
    bool goes_on_ = false;

    std::vector<AttentionScratch> attention_scratch_;  // per worker

    Step step_{};
    float* out_ = nullptr;
    std::vector<int> sequence_of_;
    std::vector<Phase> phases_;
    std::vector<Norm> norms_;
    std::vector<Conversion> conversions_;
    std::vector<PlannedProduct> products_;
    std::vector<PlannedAttention> attentions_;
    std::vector<Task> tasks_, sampled_tasks_;

    size_t capacity_ = 0;  // rows
    size_t ld_hidden_ = 0, ld_qkv_ = 0, ld_q_ = 0, ld_mlp_ = 0;
    Prepared input_;  // of the product that comes next
    Buffer<float> hidden_, qkv_, attended_, mlp_, sampled_hidden_, sampled_attended_;
    Buffer<float> joined_, features_;  // what `fuse`, or a head, reads, and what `fuse` makes
};

}  // namespace penstock
