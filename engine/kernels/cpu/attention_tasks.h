// The tasks of a step's attention: which rows and heads are worked on together.
#pragma once

#include <list>

#include "program.h"

namespace penstock {

// The rows whose queries are attended: those of all tokens, those of sampled tokens among them, or those of sampled
// tokens once they are gathered.
enum class Queries { all, sampled, gathered };

// The tasks of a step. Layers with as many heads share them.
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

    const std::vector<Task>& of(const Shape& shape, Queries queries) {
        const auto is_alike = [&](const Plan& plan) {
            return plan.kv_heads == shape.num_kv_heads && plan.group == shape.group() && plan.queries == queries;
        };
        auto plan = std::find_if(plans_.begin(), plans_.end(), is_alike);
        if (plan == plans_.end()) plan = plans_.insert(plan, {shape.num_kv_heads, shape.group(), queries, {}});
        if (plan->tasks.empty()) make(plan->tasks, shape, queries);
        return plan->tasks;
    }

    // Of each row, before or after the sampled ones are gathered.
    const int32_t* positions(bool is_gathered) const { return is_gathered ? gathered_.data() : step_.positions; }

   private:
    struct Plan {
        int kv_heads, group;
        Queries queries;
        std::vector<Task> tasks;
    };

    void make(std::vector<Task>& tasks, const Shape& shape, Queries queries) const {
        for (int i = 0; i < step_.sequences && queries == Queries::all; i++)
            add(tasks, shape, i, step_.query_starts[i], step_.query_starts[i + 1], step_.positions);
        for (int r = 0; r < step_.samples && queries != Queries::all;) {
            const int token = step_.sample_rows[r], sequence = sequence_of_[token];
            int run = 1;  // neighbours of one sequence share their tasks
            while (r + run < step_.samples && step_.sample_rows[r + run] == token + run &&
                   sequence_of_[token + run] == sequence)
                run++;
            const bool is_gathered = queries == Queries::gathered;
            const int from = is_gathered ? r : token;
            add(tasks, shape, sequence, from, from + run, positions(is_gathered));
            r += run;
        }
        std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
    }

    // With work enough for everyone, a task takes as many heads as it has rows for.
    void add(std::vector<Task>& tasks, const Shape& shape, int sequence, int from, int to,
             const int32_t* positions) const {
        const int most = limits_.tokens_per_task(shape), heads = shape.num_kv_heads;
        for (int t = from; t < to; t += most) {
            const int tokens = std::min(most, to - t);
            const bool scarce = step_.sequences < 4 * threads_;
            const int together = scarce ? 1 : limits_.heads_per_task(shape, tokens);
            for (int h = 0; h < heads; h += together) {
                const int some = std::min(together, heads - h);
                const int64_t cost = int64_t(tokens) * some * (positions[t + tokens - 1] + 1);
                tasks.push_back({sequence, t, tokens, h, some, cost});
            }
        }
    }

    const RowLimits limits_;
    const int threads_;
    Step step_{};
    const int* sequence_of_ = nullptr;
    std::list<Plan> plans_;
    std::vector<int32_t> gathered_;  // positions
};

}  // namespace penstock
