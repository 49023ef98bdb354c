// Experts: feed-forward parts of which each row has some, all rows of a step at once.
//
// What rows an expert has is known once they are routed. So the phases that multiply get their chunks then, from the
// thread that routed the last row: tiles of (expert, columns, rows), for all experts that some row has and for shared
// ones. The rows of an expert lie side by side in slots.
//
// A row's bits depend on its own numbers alone: products are as they are anywhere, and what its experts make is added up
// in the order of choice.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "program.h"

namespace penstock {

// Products of a phase, one after another.
class Products {
   public:
    void clear() {
        planned_.clear();
        chunks_ = 0;
    }

    void add(const Product& product, int threads, int linears) {
        if (!planned_.empty()) planned_.back().product.next = product.linear;
        const Cut by = cut(*product.linear, product.rows, threads, linears);
        planned_.push_back({product, by, chunks_});
        chunks_ += by.chunks();
    }

    uint32_t chunks() const { return chunks_; }

    void run(uint32_t chunk, float* sums) const {
        const auto behind = std::upper_bound(planned_.begin(), planned_.end(), chunk,
                                             [](uint32_t c, const Planned& p) { return c < p.first; });
        const Planned& planned = *(behind - 1);
        multiply(planned.product, planned.cut, chunk - planned.first, sums);
    }

   private:
    struct Planned {
        Product product;
        Cut cut;
        uint32_t first;  // chunk
    };

    std::vector<Planned> planned_;
    uint32_t chunks_ = 0;
};

// to = (to + x * scale) * after, as an operation says.
inline void add_row(const float* x, int n, float scale, float after, float* to) {
    for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
        using V = decltype(v);
        const V sum = load_first<V>(to + i, count) + load_first<V>(x + i, count) * all<V>(scale);
        store_first(to + i, sum * all<V>(after), count);
    });
}

class ExpertsWork {
   public:
    enum class Part : uint32_t { read, score, route, group, gather, gate_up, prepare, down, combine };
    static constexpr uint32_t kParts = 9;

    explicit ExpertsWork(Team& team) : team_(team), routing_(team.size()) {}

    // Rows that go through some experts.
    struct Rows {
        const Experts* experts;
        int rows, hidden;
        float eps;
        const float* from;
        size_t ld_from;
        const float* norm;  // of what is read, or null
        bool is_centered, adds;
        float scale, after;
        float* to;
        size_t ld_to;
    };

    // From now on there is room for so many rows of any of these.
    void reserve(const std::vector<const Experts*>& all, int rows, int hidden) {
        int choices = 0, scores = 0, inner = 0, depth = 0, shared = 0, own = 0;
        Form widest = Form::int8;
        for (const Experts* e : all) {
            choices = std::max(choices, e->router.top_k);
            scores = std::max(scores, e->router.experts);
            own = std::max(own, e->own);
            for (const Linear* l : {e->gate_up[0], e->down[0]}) {
                depth = std::max(depth, l->depth);
                if (size_of(l->form) > size_of(widest)) widest = l->form;
            }
            inner = std::max(inner, e->down[0]->k);
            if (e->shared_down) shared = std::max({shared, e->shared_down->depth, e->shared_gate_up->depth});
        }
        const int slots = rows * choices;
        ld_hidden_ = padded(hidden);
        ld_scores_ = padded(scores);
        ld_inner_ = padded_inner(inner);
        ld_shared_ = padded_inner(shared);
        read_ = allocate_hot<float>(rows * ld_hidden_);
        scores_ = allocate_hot<float>(rows * ld_scores_);
        inner_ = allocate_hot<float>((slots + kMostTile) * ld_inner_);
        made_ = allocate_hot<float>(slots * ld_hidden_);
        for_router_.reserve(rows, round_up(hidden, 64));
        for_experts_.reserve(rows, depth, widest);
        in_slots_.reserve(slots + kMostTile, depth, widest);
        if (shared > 0) {
            for_shared_.reserve(rows, std::max(shared, round_up(hidden, 64)));
            for_gate_.reserve(rows, round_up(hidden, 64));
            shared_inner_ = allocate_hot<float>((rows + kMostTile) * ld_shared_);
            shared_made_ = allocate_hot<float>(rows * ld_hidden_);
            gates_ = allocate_hot<float>(rows * kPanel);
        }
        ids_.resize(slots);
        weights_.resize(slots);
        std::lock_guard<std::mutex> lock(counting_);
        most_own_ = own;
        rows_of_.resize(all.size() * own);
    }

    // A new program begins; the phases of it are those of `phases`.
    void start(std::vector<Phase>* phases) {
        phases_ = phases;
        planned_.clear();
    }

    // Adds the phases by add(argument, chunks, kind); run(argument, chunk, worker) does them. Rows that are routed
    // already have these experts and weights.
    template <class Add>
    void plan(const Rows& rows, const Add& add, const int32_t* ids = nullptr, const float* weights = nullptr) {
        const Experts& e = *rows.experts;
        Plan plan{rows, ids ? ids : ids_.data(), weights ? weights : weights_.data(), {}, 0, 0};
        const uint32_t number = static_cast<uint32_t>(planned_.size());
        const auto phase = [&](Part part, int chunks, Kind kind) {
            add(number * kParts + static_cast<uint32_t>(part), chunks, kind);
            return phases_->size() - 1;
        };
        const int of_rows = divide_up(rows.rows, kRowsPerChunk);
        phase(Part::read, of_rows, Kind::norm);
        if (!ids) {
            add_scores(rows, plan.scores);
            phase(Part::score, static_cast<int>(plan.scores.chunks()), Kind::route);
            phase(Part::route, of_rows, Kind::route);
        } else {
            phase(Part::group, 1, Kind::route);
        }
        const int of_slots = divide_up(rows.rows * e.router.top_k, kRowsPerChunk);
        if (has_slots(rows)) phase(Part::gather, of_slots, Kind::prepare);
        plan.gate_up = phase(Part::gate_up, 1, Kind::gate_up);
        if (converts(*e.down[0]) || (e.shared_down && converts(*e.shared_down)))
            phase(Part::prepare, of_slots + (e.shared_down ? of_rows : 0), Kind::prepare);
        plan.down = phase(Part::down, 1, Kind::down);
        phase(Part::combine, of_rows, Kind::combine);
        planned_.push_back(std::move(plan));
    }

    void run(uint32_t argument, int chunk, int worker) {
        const Plan& plan = planned_[argument / kParts];
        switch (static_cast<Part>(argument % kParts)) {
            case Part::read: return for_rows(chunk, plan.of.rows, [&](int r) { read(plan.of, r, worker); });
            case Part::score: return plan.scores.run(chunk, team_.scratch(worker));
            case Part::route: return route(plan, chunk, worker);
            case Part::group: return group(plan);
            case Part::gather: return for_rows(chunk, used_, [&](int slot) { gather(plan, slot, worker); });
            case Part::gate_up: return run_products(gate_up_, chunk, worker);
            case Part::prepare: return prepare(plan, chunk);
            case Part::down: return run_products(down_, chunk, worker);
            case Part::combine: return for_rows(chunk, plan.of.rows, [&](int r) { combine(plan, r, worker); });
        }
    }

    // The experts that rows had, summed over operations, and how many operations these were: of all programs since this
    // was asked last.
    void take_touched(int64_t* out) {
        std::lock_guard<std::mutex> lock(counting_);
        out[0] = std::exchange(touched_, 0);
        out[1] = std::exchange(operations_, 0);
    }

    // The rows that each expert had, [operations][most experts of one]: of all programs since this was asked last.
    void take_rows(int64_t* out) {
        std::lock_guard<std::mutex> lock(counting_);
        std::copy(rows_of_.begin(), rows_of_.end(), out);
        std::fill(rows_of_.begin(), rows_of_.end(), 0);
    }

   private:
    static constexpr int kMostTile = 32;  // rows that tiles read together, though there are fewer

    struct Plan {
        Rows of;
        const int32_t* ids;
        const float* weights;
        Products scores;
        size_t gate_up, down;  // their phases
    };

    template <class Function>
    static void for_rows(int chunk, int rows, const Function& function) {
        for (int r = chunk * kRowsPerChunk; r < std::min(rows, (chunk + 1) * kRowsPerChunk); r++) function(r);
    }

    // One row that all of its experts read as it is needs no slots.
    static bool has_slots(const Rows& of) { return of.rows > 1 || of.experts->each_reads_its_own; }

    // The form of rows between two linears, which the first one may write as the second reads it.
    static bool converts(const Linear& next) { return next.form == Form::int8 || !(form_before(next) == next.form); }
    static Form form_before(const Linear& next) {
        return next.form == Form::bf16 && next.k == next.depth ? Form::bf16 : Form::f32;
    }

    static Activations rows_of(const float* x, size_t ld, Form form) { return {form, x, ld * size_of(form), nullptr}; }

    // ---- before the products -----------------------------------------------------------------------------------

    // What the part reads of a row.
    const float* input(const Rows& of, int r) const {
        return of.norm ? read_.get() + r * ld_hidden_ : of.from + r * of.ld_from;
    }

    // The norm of a row, in the worker's scratch, or the row itself.
    const float* normed(const Rows& of, const float* weight, const float* x, int worker) const {
        if (weight == nullptr) return x;
        rms_norm(x, weight, of.hidden, of.eps, team_.scratch(worker));
        return team_.scratch(worker);
    }

    void read(const Rows& of, int r, int worker) {
        const Experts& e = *of.experts;
        const float* x = of.from + r * of.ld_from;
        if (of.norm) {
            float* out = read_.get() + r * ld_hidden_;
            (of.is_centered ? layer_norm : rms_norm)(x, of.norm, of.hidden, of.eps, out);
            x = out;
        }
        if (e.logits) for_router_.convert(*e.logits, r, normed(of, e.router_norm, x, worker));
        if (!e.each_reads_its_own) for_experts_.convert(*e.gate_up[0], r, normed(of, e.norm, x, worker));
        if (e.shared_gate_up) for_shared_.convert(*e.shared_gate_up, r, normed(of, e.shared_norm, x, worker));
        if (e.shared_gate) for_gate_.convert(*e.shared_gate, r, x);
    }

    void add_scores(const Rows& of, Products& scores) const {
        const auto add = [&](const Linear* linear, const Prepared& x, float* out, size_t ld) {
            if (linear)
                scores.add({linear, x.activations(*linear), of.rows, out, ld, Form::f32, nullptr, nullptr},
                           team_.size(), 1);
        };
        add(of.experts->logits, for_router_, scores_.get(), ld_scores_);
        add(of.experts->shared_gate, for_gate_, gates_.get(), kPanel);
    }

    void route(const Plan& plan, int chunk, int worker) {
        const Router& router = plan.of.experts->router;
        for_rows(chunk, plan.of.rows, [&](int r) {
            const size_t at = static_cast<size_t>(r) * router.top_k;
            routing_[worker].route(router, scores_.get() + r * ld_scores_, ids_.data() + at, weights_.data() + at);
        });
        const int chunks = divide_up(plan.of.rows, kRowsPerChunk);
        if (routed_.fetch_add(1, std::memory_order_acq_rel) + 1 < chunks) return;
        routed_.store(0, std::memory_order_relaxed);
        group(plan);
    }

    // Gives every choice a slot, those of an expert side by side in the order of rows, and the products their chunks.
    void group(const Plan& plan) {
        const Experts& e = *plan.of.experts;
        const int choices = plan.of.rows * e.router.top_k;
        starts_.assign(e.own + 1, 0);
        const auto own = [&](int choice) { return plan.ids[choice] - e.first; };
        const auto is_own = [&](int choice) { return own(choice) >= 0 && own(choice) < e.own; };
        for (int c = 0; c < choices; c++)
            if (is_own(c)) starts_[own(c) + 1]++;
        for (int expert = 0; expert < e.own; expert++) starts_[expert + 1] += starts_[expert];
        used_ = starts_[e.own];
        slots_.assign(choices, -1);
        choices_.resize(choices);
        next_.assign(starts_.begin(), starts_.end());
        for (int c = 0; c < choices; c++)
            if (is_own(c)) choices_[slots_[c] = next_[own(c)]++] = c;
        add_products(plan);
    }

    void add_products(const Plan& plan) {
        const Experts& e = *plan.of.experts;
        gate_up_.clear();
        down_.clear();
        const int touched = count(&plan - planned_.data(), e.own);
        const int linears = touched + (e.shared_gate_up ? 1 : 0);
        for (int expert = 0; expert < e.own; expert++) {
            const int start = starts_[expert], rows = starts_[expert + 1] - start;
            if (rows == 0) continue;
            const Linear& first = *e.gate_up[expert];
            const Activations x = has_slots(plan.of) ? in_slots_.activations(first).from(start)
                                                     : for_experts_.activations(first);
            float* inner = at(inner_, start, ld_inner_, form_before(*e.down[expert]));
            add_pair(first, x, rows, inner, ld_inner_, *e.down[expert], in_slots_, start,
                     made_.get() + start * ld_hidden_, Gate::silu, &e.bend, linears);
        }
        if (e.shared_gate_up)
            add_pair(*e.shared_gate_up, for_shared_.activations(*e.shared_gate_up), plan.of.rows,
                     shared_inner_.get(), ld_shared_, *e.shared_down, for_shared_, 0, shared_made_.get(),
                     e.shared_activation, nullptr, linears);
        (*phases_)[plan.gate_up].chunks = std::max(1u, gate_up_.chunks());
        (*phases_)[plan.down].chunks = std::max(1u, down_.chunks());
    }

    // How many experts of an operation have rows, which are counted.
    int count(size_t operation, int own) {
        std::lock_guard<std::mutex> lock(counting_);
        int touched = 0;
        for (int expert = 0; expert < own; expert++) {
            const int rows = starts_[expert + 1] - starts_[expert];
            rows_of_[operation * most_own_ + expert] += rows;
            touched += rows > 0;
        }
        touched_ += touched;
        operations_++;
        return touched;
    }

    static float* at(const Buffer<float>& buffer, int row, size_t ld, Form form) {
        return reinterpret_cast<float*>(reinterpret_cast<char*>(buffer.get()) + row * ld * size_of(form));
    }

    // The two products of some rows; what lies between them is in `prepared` if it is converted.
    void add_pair(const Linear& first, const Activations& x, int rows, float* inner, size_t ld, const Linear& second,
                  const Prepared& prepared, int start, float* made, Gate gate, const Bend* bend, int linears) {
        const Form form = form_before(second);
        gate_up_.add({&first, x, rows, inner, ld, form, nullptr, nullptr, gate, 1.0f, 0.0f, bend}, team_.size(), linears);
        const Activations between =
            converts(second) ? prepared.activations(second).from(start) : rows_of(inner, ld, form);
        down_.add({&second, between, rows, made, ld_hidden_, Form::f32, nullptr, nullptr}, team_.size(), linears);
    }

    int expert_of(int slot) const {
        return static_cast<int>(std::upper_bound(starts_.begin(), starts_.end(), slot) - starts_.begin()) - 1;
    }

    // What an expert reads of a row, in the form of its linear.
    void gather(const Plan& plan, int slot, int worker) {
        const Experts& e = *plan.of.experts;
        const int choice = choices_[slot], r = choice / e.router.top_k;
        const Linear& linear = *e.gate_up[expert_of(slot)];
        if (!e.each_reads_its_own) return in_slots_.copy(linear, for_experts_, r, slot);
        const float* x = normed(plan.of, e.norm, input(plan.of, r), worker);
        if (e.weighs_inputs) {
            float* weighed = team_.scratch(worker);
            if (x != weighed) std::memcpy(weighed, x, plan.of.hidden * sizeof(float));
            penstock::multiply(weighed, plan.of.hidden, plan.weights[choice]);
            x = weighed;
        }
        in_slots_.convert(linear, slot, x);
    }

    // ---- the products, and what lies between and behind them -----------------------------------------------------

    void run_products(const Products& products, int chunk, int worker) {
        if (products.chunks() > 0) products.run(chunk, team_.scratch(worker));
    }

    void prepare(const Plan& plan, int chunk) {
        const Experts& e = *plan.of.experts;
        const int of_slots = divide_up(plan.of.rows * e.router.top_k, kRowsPerChunk);
        if (chunk < of_slots) {
            if (!converts(*e.down[0])) return;
            return for_rows(chunk, used_, [&](int slot) {
                in_slots_.convert(*e.down[expert_of(slot)], slot, inner_.get() + slot * ld_inner_);
            });
        }
        if (converts(*e.shared_down))
            for_rows(chunk - of_slots, plan.of.rows, [&](int r) {
                for_shared_.convert(*e.shared_down, r, shared_inner_.get() + r * ld_shared_);
            });
    }

    void combine(const Plan& plan, int r, int worker) {
        const Rows& of = plan.of;
        const Experts& e = *of.experts;
        float* sum = team_.scratch(worker);
        std::memset(sum, 0, of.hidden * sizeof(float));
        for (int c = r * e.router.top_k; c < (r + 1) * e.router.top_k; c++)
            if (slots_[c] >= 0)
                add(sum, made_.get() + slots_[c] * ld_hidden_, of.hidden, e.weighs_inputs ? 1.0f : plan.weights[c]);
        if (e.out_norm) rms_norm(sum, e.out_norm, of.hidden, of.eps, sum);
        if (e.shared_gate_up) add_shared(of, r, sum);
        float* to = of.to + r * of.ld_to;
        if (!of.adds) std::memset(to, 0, of.hidden * sizeof(float));
        add_row(sum, of.hidden, of.scale, of.after, to);
    }

    void add_shared(const Rows& of, int r, float* sum) {
        const Experts& e = *of.experts;
        float* shared = shared_made_.get() + r * ld_hidden_;
        if (e.shared_out_norm) rms_norm(shared, e.shared_out_norm, of.hidden, of.eps, shared);
        add(sum, shared, of.hidden, e.shared_gate ? sigmoid(splat(gates_[r * kPanel]))[0] : 1.0f);
    }

    static void add(float* sum, const float* x, int n, float weight) {
        for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
            using V = decltype(v);
            store_first(sum + i, load_first<V>(sum + i, count) + all<V>(weight) * load_first<V>(x + i, count), count);
        });
    }

    Team& team_;
    std::vector<Routing> routing_;  // per worker
    std::vector<Phase>* phases_ = nullptr;
    std::vector<Plan> planned_;
    std::mutex counting_;  // steps run beside whoever takes the counts
    int64_t touched_ = 0, operations_ = 0;  // see take_touched
    std::vector<int64_t> rows_of_;           // see take_rows
    int most_own_ = 0;

    // Of the operation in work.
    std::atomic<int> routed_{0};  // chunks
    std::vector<int32_t> ids_;
    std::vector<float> weights_;
    std::vector<int> starts_, next_;    // the first slot of each expert, and the next one
    std::vector<int> slots_, choices_;  // of each choice, or -1; of each slot
    int used_ = 0;                      // slots
    Products gate_up_, down_;

    size_t ld_hidden_ = 0, ld_scores_ = 0, ld_inner_ = 0, ld_shared_ = 0;
    Buffer<float> read_, scores_, inner_, made_;  // the last two in slots
    Buffer<float> shared_inner_, shared_made_, gates_;
    Prepared for_router_, for_experts_, for_shared_, for_gate_, in_slots_;
};

// The same as a program of its own, for rows that are routed already: out [rows][hidden].
inline void run_experts(Team& team, const Experts& experts, const float* x, int rows, const int32_t* ids,
                        const float* weights, float* out) {
    const int hidden = experts.gate_up[0]->k;
    const size_t ld = static_cast<size_t>(hidden);
    ExpertsWork work(team);
    work.reserve({&experts}, rows, hidden);
    std::vector<Phase> phases;
    work.start(&phases);
    const auto call = [](void* job, uint32_t argument, uint32_t chunk, int worker) {
        static_cast<ExpertsWork*>(job)->run(argument, static_cast<int>(chunk), worker);
    };
    work.plan({&experts, rows, hidden, 0.0f, x, ld, nullptr, false, false, 1.0f, 1.0f, out, ld},
              [&](uint32_t argument, int chunks, Kind kind) {
                  phases.push_back({call, argument, static_cast<uint32_t>(chunks), kind});
              },
              ids, weights);
    team.run(&work, phases.data(), phases.size());
}

}  // namespace penstock
