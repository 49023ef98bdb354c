// The tasks of a step's attention: which rows and heads are worked on together.
#pragma once

#include <list>
#include <tuple>

#include "program.h"

namespace penstock {

// The rows whose queries are attended: those of all tokens, those of sampled tokens among them, or those of sampled
// tokens once they are gathered.
enum class Queries { all, sampled, gathered };

// The tasks of a step. Layers of one shape, whose tokens see as much, share them.
class AttentionTasks {
   public:
    AttentionTasks(const RowLimits& limits, int threads) : limits_(limits), threads_(threads) {}

    // Forgets the tasks of the step before.
    void start(const Step& step, const int* sequence_of) {
        step_ = step;
        sequence_of_ = sequence_of;
        for (Plan& plan : plans_) plan.tasks.clear();
        gathered_.clear();
        for (int r = 0; r < step.samples; r++) gathered_.push_back(step.positions[step.sample_rows[r]]);
    }

    // Those of a layer, whose step says what a token sees.
    const std::vector<Task>& of(const AttentionStep& step, Queries queries) {
        const Shape& shape = *step.shape;
        const Key key{shape.num_kv_heads, shape.group(), shape.head_dim, step.window, step.first, queries};
        auto plan = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) { return plan.key == key; });
        if (plan == plans_.end()) plan = plans_.insert(plan, Plan{key, {}, {}, {}, 0});
        if (plan->tasks.empty()) make(*plan, step);
        return plan->tasks;
    }

    // Of each row, before or after the sampled ones are gathered.
    const int32_t* positions(bool is_gathered) const { return is_gathered ? gathered_.data() : step_.positions; }

   private:
    typedef std::tuple<int, int, int, int, int, Queries> Key;

    struct Plan {
        Key key;
        std::vector<Task> tasks;
        std::list<Split> splits;
        Buffer<float> records;
        size_t capacity;  // of the records
    };

    // Rows [from, to), which are neighbours in one sequence.
    struct Run {
        int sequence, from, to;
    };

    std::vector<Run> runs_of(Queries queries) const {
        std::vector<Run> runs;
        for (int i = 0; i < step_.sequences && queries == Queries::all; i++)
            if (step_.query_starts[i] < step_.query_starts[i + 1])
                runs.push_back({i, step_.query_starts[i], step_.query_starts[i + 1]});
        for (int r = 0; r < step_.samples && queries != Queries::all;) {
            const int token = step_.sample_rows[r], sequence = sequence_of_[token];
            int run = 1;  // neighbours of one sequence share their tasks
            while (r + run < step_.samples && step_.sample_rows[r + run] == token + run &&
                   sequence_of_[token + run] == sequence)
                run++;
            const int from = queries == Queries::gathered ? r : token;
            runs.push_back({sequence, from, from + run});
            r += run;
        }
        return runs;
    }

    void make(Plan& plan, const AttentionStep& step) const {
        const std::vector<Run> runs = runs_of(std::get<Queries>(plan.key));
        int64_t total = 0;
        for (const Run& run : runs) total += cost_of(step, run.from, run.to) * step.shape->num_kv_heads;
        size_t size = 0;
        plan.splits.clear();
        for (const Run& run : runs)
            if (!add_split(plan, step, run, total / (4 * threads_), size)) add(plan, step, run);
        if (size > plan.capacity) {
            plan.capacity = 0;
            plan.records = allocate<float>(size);
            plan.capacity = size;
        }
        for (Split& split : plan.splits) split.records = plan.records.get() + split.place;
        std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                         [](const Task& a, const Task& b) { return a.cost > b.cost; });
    }

    // Of one kv head of rows that are neighbours.
    static int64_t cost_of(const AttentionStep& step, int from, int to) {
        return int64_t(to - from) * (step.positions[to - 1] + 1 - first_seen(step, step.positions[from]));
    }

    // With work enough for everyone, a task takes as many heads as it has rows for.
    void add(Plan& plan, const AttentionStep& step, const Run& run) const {
        const int most = limits_.tokens_per_task(*step.shape);
        const bool is_scarce = step_.sequences < 4 * threads_;
        for (int t = run.from; t < run.to; t += most) {
            const int to = std::min(t + most, run.to);
            const int64_t cost = cost_of(step, t, to);
            for_heads(step, to - t, is_scarce ? 1 : step.shape->num_kv_heads, [&](int head, int some) {
                plan.tasks.push_back({run.sequence, t, to - t, head, some, cost * some, nullptr, 0});
            });
        }
    }

    // Makes a task of each segment of a few rows, if their heads are more than `share` of the step's cost, which is small
    // beside what a thread has to do.
    bool add_split(Plan& plan, const AttentionStep& step, const Run& run, int64_t share, size_t& size) const {
        const Shape& shape = *step.shape;
        const int tokens = run.to - run.from, heads = shape.num_kv_heads;
        const int first = first_seen(step, step.positions[run.from]) / kSegment;
        const int segments = step.positions[run.to - 1] / kSegment + 1 - first;
        const size_t more = segments * record_size(shape.head_dim) * shape.num_heads * tokens;
        if (segments == 1 || tokens > limits_.tokens_per_task(shape) || size + more > kMostRecords) return false;
        if (cost_of(step, run.from, run.to) * heads <= share) return false;
        const int64_t cost = int64_t(tokens) * kSegment;
        for_heads(step, tokens, std::max<int64_t>(share / cost, 1), [&](int head, int some) {
            plan.splits.emplace_back(first, segments, size);
            size += more / heads * some;
            for (int i = first; i < first + segments; i++)
                plan.tasks.push_back({run.sequence, run.from, tokens, head, some, cost * some, &plan.splits.back(), i});
        });
        return true;
    }

    // Calls function(first head, heads) for at most `most` kv heads at a time, and no more than a task has rows for.
    template <class Function>
    void for_heads(const AttentionStep& step, int tokens, int64_t most, const Function& function) const {
        const int heads = step.shape->num_kv_heads;
        const int together = static_cast<int>(std::min<int64_t>(most, limits_.heads_per_task(*step.shape, tokens)));
        for (int head = 0; head < heads; head += together) function(head, std::min(together, heads - head));
    }

    static constexpr size_t kMostRecords = size_t(16) << 20;  // floats, of a step

    const RowLimits limits_;
    const int threads_;
    Step step_{};
    const int* sequence_of_ = nullptr;
    std::list<Plan> plans_;
    std::vector<int32_t> gathered_;  // positions
};

}  // namespace penstock
