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
        gathered_rotary_.clear();
        for (int r = 0; r < step.samples; r++) {
            gathered_.push_back(step.positions[step.sample_rows[r]]);
            gathered_rotary_.push_back(step.rotated_by()[step.sample_rows[r]]);
        }
    }

    // Those of a layer, whose step says what a token sees.
    const std::vector<Task>& of(const AttentionStep& step, Queries queries) {
        const Shape& shape = *step.shape;
        const Key key{shape.parts(), shape.group(), shape.head_dim, step.window, step.first, queries};
        auto plan = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) { return plan.key == key; });
        if (plan == plans_.end()) plan = plans_.insert(plan, Plan{key, {}, {}, {}, 0});
        if (plan->tasks.empty()) make(*plan, step);
        return plan->tasks;
    }

    // Of each row, before or after the sampled ones are gathered.
    const int32_t* positions(bool is_gathered) const { return is_gathered ? gathered_.data() : step_.positions; }

    const int32_t* rotary_positions(bool is_gathered) const {
        return is_gathered ? gathered_rotary_.data() : step_.rotated_by();
    }

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
        if (queries == Queries::all) return runs;
        std::vector<int32_t> sampled(step_.sample_rows, step_.sample_rows + step_.samples);
        if (queries == Queries::sampled) {  // each once: what is attended to may take the place of the queries
            std::sort(sampled.begin(), sampled.end());
            sampled.erase(std::unique(sampled.begin(), sampled.end()), sampled.end());
        }
        for (int r = 0, count = static_cast<int>(sampled.size()); r < count;) {
            const int token = sampled[r], sequence = sequence_of_[token];
            int run = 1;  // neighbours of one sequence share their tasks
            while (r + run < count && sampled[r + run] == token + run && sequence_of_[token + run] == sequence) run++;
            const int from = queries == Queries::gathered ? r : token;
            runs.push_back({sequence, from, from + run});
            r += run;
        }
        return runs;
    }

    void make(Plan& plan, const AttentionStep& step) const {
        const std::vector<Run> runs = runs_of(std::get<Queries>(plan.key));
        int64_t total = 0;
        for (const Run& run : runs) total += cost_of(step, run.from, run.to) * step.shape->parts();
        const int least = least_parts(*step.shape, runs);
        size_t size = 0;
        plan.splits.clear();
        for (const Run& run : runs)
            if (!add_split(plan, step, run, total / (4 * threads_), least, size)) add(plan, step, run, least);
        if (size > plan.capacity) {
            plan.capacity = 0;
            plan.records = allocate<float>(size);
            plan.capacity = size;
        }
        for (Split& split : plan.splits) split.records = plan.records.get() + split.place;
        std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                         [](const Task& a, const Task& b) { return a.cost > b.cost; });
    }

    // The fewest parts of a task: one where there is little work. Query heads that are rows of one pass over latents share
    // the cost of the pass, so that these are as many as leave each thread a task.
    int least_parts(const Shape& shape, const std::vector<Run>& runs) const {
        if (!shape.latent) return step_.sequences < 4 * threads_ ? 1 : shape.num_kv_heads;
        int64_t pieces = 0;
        for (const Run& run : runs) pieces += divide_up(run.to - run.from, limits_.tokens_per_task(shape));
        const int64_t fair = (shape.num_heads * pieces + threads_ - 1) / threads_;
        return static_cast<int>(std::clamp<int64_t>(fair, std::min(shape.num_heads, std::max(kTileRows, limits_.unit)), shape.num_heads));
    }

    // Of one part of rows that are neighbours.
    static int64_t cost_of(const AttentionStep& step, int from, int to) {
        return int64_t(to - from) * (step.positions[to - 1] + 1 - first_seen(step, step.positions[from]));
    }

    // With work enough for everyone, a task takes as many parts as it has rows for.
    void add(Plan& plan, const AttentionStep& step, const Run& run, int least) const {
        const int most = limits_.tokens_per_task(*step.shape);
        for (int t = run.from; t < run.to; t += most) {
            const int to = std::min(t + most, run.to);
            const int64_t cost = cost_of(step, t, to);
            for_parts(step, to - t, least, [&](int part, int some) {
                plan.tasks.push_back({run.sequence, t, to - t, part, some, cost * some, nullptr, 0});
            });
        }
    }

    // Makes a task of each segment of a few rows, if their parts are more than `share` of the step's cost, which is small
    // beside what a thread has to do.
    bool add_split(Plan& plan, const AttentionStep& step, const Run& run, int64_t share, int least, size_t& size) const {
        const Shape& shape = *step.shape;
        const int tokens = run.to - run.from, parts = shape.parts();
        const int first = first_seen(step, step.positions[run.from]) / kSegment;
        const int segments = step.positions[run.to - 1] / kSegment + 1 - first;
        const size_t more = segments * record_size(shape.value_dim()) * shape.num_heads * tokens;
        if (segments == 1 || tokens > limits_.tokens_per_task(shape) || size + more > kMostRecords) return false;
        if (cost_of(step, run.from, run.to) * parts <= share) return false;
        const int64_t cost = int64_t(tokens) * kSegment;
        for_parts(step, tokens, std::max<int64_t>(share / cost, shape.latent ? least : 1), [&](int part, int some) {
            plan.splits.emplace_back(first, segments, size);
            size += more / parts * some;
            for (int i = first; i < first + segments; i++)
                plan.tasks.push_back({run.sequence, run.from, tokens, part, some, cost * some, &plan.splits.back(), i});
        });
        return true;
    }

    // Calls function(first part, parts) for at most `most` parts at a time, and no more than a task has rows for.
    template <class Function>
    void for_parts(const AttentionStep& step, int tokens, int64_t most, const Function& function) const {
        const int parts = step.shape->parts();
        int together = static_cast<int>(std::min<int64_t>(most, limits_.parts_per_task(*step.shape, tokens)));
        if (step.shape->latent) together = even_part(parts, together);
        for (int part = 0; part < parts; part += together) function(part, std::min(together, parts - part));
    }

    static constexpr size_t kMostRecords = size_t(16) << 20;  // floats, of a step

    const RowLimits limits_;
    const int threads_;
    Step step_{};
    const int* sequence_of_ = nullptr;
    std::list<Plan> plans_;
    std::vector<int32_t> gathered_, gathered_rotary_;  // positions
};

}  // namespace penstock
