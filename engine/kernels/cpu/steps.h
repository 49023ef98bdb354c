// Plain steps, in which every sequence computes the token that it sampled last and the drafts behind it, if there are any,
// and chooses the next of each, run behind the caller: a thread takes them from a queue one by one, as a device would.
//
// What a step needs of the caller is copied when it is put; all else it finds in the tables, where the steps before
// left it. Nobody else may touch the tables, the decoder, the head or the chooser until `drain` has returned.
#pragma once

#include "decoder.h"
#include "inputs.h"
#include "sample.h"

namespace penstock {

// What all steps have in common.
struct StepTables {
    int32_t* words;  // of the table of sequences, as a whole
    int32_t *lengths, *prompt_lens, *last_tokens, *block_tables;
    int32_t num_rows, max_blocks;
    int32_t num_tables;  // block tables of a sequence, whose entries for the same tokens lie side by side
    int32_t width;       // of a row of hidden states
    ChooseArgs choose;   // its tables
};

struct PlainStep {
    const int32_t* slots;             // [num_sequences]
    const int32_t *places, *values;   // [num_changes]: words of the table that are overwritten first
    const int32_t* counts;            // [num_sequences]: the drafts of each; null if none has any
    const int32_t* drafts;            // one sequence's after another's
    int32_t num_sequences, num_changes;
    int32_t num_blocks;               // no sequence has more, in all its tables
    int32_t top_k, top_p;
};

class StepQueue {
   public:
    StepQueue(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const StepTables& tables)
        : team_(team), decoder_(decoder), head_(head), chooser_(chooser), tables_(tables), thread_([this] { work(); }) {}

    ~StepQueue() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        put_.notify_all();
        thread_.join();  // once the steps that were put have ended
    }

    StepQueue(const StepQueue&) = delete;
    StepQueue& operator=(const StepQueue&) = delete;

    // False after a fork: the thread stayed behind.
    bool is_whole() const { return team_.is_whole(); }

    // The number of the step, with which it is waited for.
    int64_t put(const PlainStep& step) {
        Job job(step);
        std::lock_guard<std::mutex> lock(mutex_);
        job.number = ++num_put_;
        jobs_.push_back(std::move(job));
        put_.notify_one();
        return num_put_;
    }

    // Runs a step on the caller's thread, after all that were put, and writes its tokens; its status.
    int32_t run(const PlainStep& step, int32_t* token_ids) {
        drain();
        return run(Job(step), token_ids);
    }

    // Waits for a step and writes its tokens, one a row; its status. Each is waited for once, in any order.
    int32_t wait(int64_t number, int32_t* token_ids) {
        std::unique_lock<std::mutex> lock(mutex_);
        wait_until(lock, ended_, [&] { return num_ended_ >= number; });
        const auto at = std::find_if(results_.begin(), results_.end(), [&](auto& one) { return one.number == number; });
        if (at == results_.end()) return kBadSlot;
        const int32_t status = at->status;
        std::copy(at->token_ids.begin(), at->token_ids.end(), token_ids);
        results_.erase(at);
        return status;
    }

    // Waits until no step is left.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        wait_until(lock, ended_, [&] { return num_ended_ == num_put_; });
    }

   private:
    static constexpr int kTogether = 64;  // rows of logits: where more have theirs at once, their memory is what costs

    struct Job {
        explicit Job(const PlainStep& step)
            : step(step),
              slots(step.slots, step.slots + step.num_sequences),
              places(step.places, step.places + step.num_changes),
              values(step.values, step.values + step.num_changes) {
            const int32_t* drafts = step.drafts;
            for (int s = 0; s < step.num_sequences; s++) {
                const int count = step.counts ? step.counts[s] : 0;
                starts.push_back(static_cast<int32_t>(tokens.size()));
                tokens.push_back(-1);  // from the table
                for (int i = 0; i < count; i++) tokens.push_back(*drafts++);
                row_slots.resize(tokens.size(), slots[s]);
            }
            starts.push_back(static_cast<int32_t>(tokens.size()));
        }

        size_t rows() const { return tokens.size(); }

        int64_t number = 0;
        PlainStep step;  // its pointers are not valid any more
        std::vector<int32_t> slots, places, values;
        std::vector<int32_t> starts, tokens, row_slots;  // where a sequence's rows start; of each row
    };

    struct Result {
        int64_t number;
        int32_t status;
        std::vector<int32_t> token_ids;
    };

    template <class Condition>
    static void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& news, Condition condition) {
        // What news.wait does; GCC 12 gives that function a new version, which older systems' libstdc++ lacks.
        while (!condition()) pthread_cond_wait(news.native_handle(), lock.mutex()->native_handle());
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wait_until(lock, put_, [&] { return stopping_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            const Job job = std::move(jobs_.front());
            jobs_.erase(jobs_.begin());
            lock.unlock();
            Result result{job.number, kNoMemory, {}};
            try {
                result.token_ids.assign(job.rows(), -1);
                result.status = run(job, result.token_ids.data());
            } catch (...) {  // no memory
            }
            lock.lock();
            num_ended_ = job.number;
            results_.push_back(std::move(result));
            ended_.notify_all();
        }
    }

    int run(const Job& job, int32_t* token_ids) {
        for (size_t i = 0; i < job.places.size(); i++) tables_.words[job.places[i]] = job.values[i];
        reserve(job);
        const GatherArgs inputs = inputs_of(job);
        if (const Status status = gather(inputs); status != kOk) return status;
        const int num = inputs.num_sequences, rows = inputs.num_tokens;
        for (int s = 0; s < num; s++)  // each row chooses what follows it
            for (int at = job.starts[s], end = job.starts[s + 1]; at < end; at++)
                numbers_[at] = inputs.numbers()[s] - (end - 1 - at);
        const Step step{inputs.out_token_ids(), inputs.positions(), inputs.query_starts, inputs.context_lens(),
                        block_tables_of(inputs), counting_.data(), rows, num,
                        inputs.num_blocks / tables_.num_tables, rows, nullptr, nullptr, 0};
        if (const int status = decoder_.run(step, hidden_.data()); status != kOk) return status;
        for (int from = 0; from < rows; from += kTogether)
            if (!choose(job, from, std::min(kTogether, rows - from), token_ids)) return kBadSlot;
        return kOk;
    }

    // The tokens of some of the rows, from their hidden states. The table keeps a sequence's last one.
    bool choose(const Job& job, int from, int num, int32_t* token_ids) {
        const size_t width = tables_.width;
        apply(team_, head_, hidden_.data() + from * width, width, num, logits_.get());
        ChooseArgs choose = tables_.choose;
        choose.logits = logits_.get();
        choose.slots = job.row_slots.data() + from;
        choose.numbers = numbers_.data() + from;
        choose.token_ids = token_ids + from;
        choose.masks = nullptr;
        choose.num_rows = num;
        choose.top_k = job.step.top_k;
        choose.top_p = job.step.top_p;
        if (!chooser_.choose(choose)) return false;
        for (int r = 0; r < num; r++) tables_.last_tokens[choose.slots[r]] = choose.token_ids[r];
        return true;
    }

    void reserve(const Job& job) {
        const size_t num = job.slots.size(), rows = job.rows();
        words_.resize(2 * rows + 3 * num + num * job.step.num_blocks);
        blocks_.resize(tables_.num_tables > 1 ? num * job.step.num_blocks : 0);
        hidden_.resize(rows * tables_.width);
        numbers_.resize(rows);
        while (counting_.size() < rows) counting_.push_back(static_cast<int32_t>(counting_.size()));
        const size_t num_logits = std::min<size_t>(rows, kTogether);
        if (num_logits <= num_logits_) return;
        num_logits_ = 0;
        logits_ = allocate<float>(num_logits * tables_.choose.vocab);
        num_logits_ = num_logits;
    }

    GatherArgs inputs_of(const Job& job) {
        const int num = job.step.num_sequences;
        return {tables_.lengths, tables_.prompt_lens, tables_.last_tokens, tables_.block_tables, tables_.num_rows,
                tables_.max_blocks, job.slots.data(), job.starts.data(), job.tokens.data(), num,
                static_cast<int32_t>(job.rows()), job.step.num_blocks, words_.data()};
    }

    // [num_tables][sequences][blocks]
    const int32_t* block_tables_of(const GatherArgs& inputs) {
        const int32_t* entries = inputs.out_block_tables();
        if (tables_.num_tables == 1) return entries;
        int32_t* out = blocks_.data();
        for (int table = 0; table < tables_.num_tables; table++)
            for (int i = table; i < inputs.num_sequences * inputs.num_blocks; i += tables_.num_tables) *out++ = entries[i];
        return blocks_.data();
    }

    Team& team_;
    Decoder& decoder_;
    const Linear& head_;
    Chooser& chooser_;
    const StepTables tables_;

    std::vector<int32_t> words_, blocks_, numbers_, counting_;
    std::vector<float> hidden_;
    Buffer<float> logits_;
    size_t num_logits_ = 0;  // rows

    std::mutex mutex_;
    std::condition_variable put_, ended_;
    std::vector<Job> jobs_;  // at most two: no deque, whose allocation has a new version in GCC 12
    std::vector<Result> results_;
    int64_t num_put_ = 0, num_ended_ = 0;
    bool stopping_ = false;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace penstock
