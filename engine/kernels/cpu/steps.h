// Plain steps, in which every sequence computes the token that it sampled last and the drafts behind it, if there are any,
// and chooses the next of each, run behind the caller: a thread takes them from a queue one by one, as a device would.
//
// What a step needs of the caller is copied when it is put; all else it finds in the tables, where the steps before
// left it. Nobody else may touch the tables, the decoder, the head or the chooser until `drain` has returned.
#pragma once

#include "table_steps.h"

namespace penstock {

class StepQueue {
   public:
    StepQueue(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const StepTables& tables)
        : team_(team),
          decoder_(decoder),
          rows_(team, head, chooser, tables),
          inputs_(tables),
          last_tokens_(tables.last_tokens),
          width_(tables.width),
          thread_([this] { work(); }) {}

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
    int64_t put(const TableStep& step) {
        Job job(step);
        std::lock_guard<std::mutex> lock(mutex_);
        job.number = num_put_ + 1;
        results_.reserve(results_.size() + jobs_.size() + 2);  // where it ends, nothing may fail
        jobs_.push_back(std::move(job));
        put_.notify_one();
        return ++num_put_;
    }

    // Runs a step on the caller's thread, after all that were put, and writes its tokens; its status.
    int32_t run(const TableStep& step, int32_t* token_ids) {
        drain();
        return work_on(step, token_ids);
    }

    // Waits for a step and writes its tokens, one a row; its status. Each is waited for once, in any order.
    int32_t wait(int64_t number, int32_t* token_ids) {
        std::unique_lock<std::mutex> lock(mutex_);
        wait_until(lock, ended_, [&] { return num_ended_ >= number; });
        const auto at = std::find_if(results_.begin(), results_.end(), [&](auto& one) { return one.number == number; });
        if (at == results_.end()) return kBadSeat;
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
    struct Job {
        explicit Job(const TableStep& step) : words(step.words, step.words + step.size()), step(step) {
            this->step.words = words.data();
        }

        int64_t number = 0;
        std::vector<int32_t> words;
        TableStep step;
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
                result.token_ids.assign(job.step.num_tokens, -1);
                result.status = work_on(job.step, result.token_ids.data());
            } catch (...) {  // no memory
            }
            lock.lock();
            num_ended_ = job.number;
            results_.push_back(std::move(result));
            ended_.notify_all();
        }
    }

    // Each row chooses what follows it. The table keeps a sequence's last one.
    int work_on(const TableStep& step, int32_t* token_ids) {
        if (const Status status = inputs_.make(step); status != kOk) return status;
        const int rows = step.num_tokens;
        hidden_.resize(static_cast<size_t>(rows) * width_);
        numbers_.resize(rows);
        seats_.resize(rows);
        for (int s = 0; s < step.num_sequences; s++)
            for (int at = step.starts()[s], end = step.starts()[s + 1]; at < end; at++) {
                seats_[at] = step.seats()[s];
                numbers_[at] = inputs_.made().numbers()[s] - (end - 1 - at);
            }
        const Step inputs = inputs_.step(inputs_.counting(rows), rows);
        if (const int status = decoder_.run(inputs, hidden_.data()); status != kOk) return status;
        if (!rows_.choose(step, hidden_.data(), seats_.data(), numbers_.data(), rows, token_ids)) return kBadSeat;
        for (int r = 0; r < rows; r++) last_tokens_[seats_[r]] = token_ids[r];
        return kOk;
    }

    Team& team_;
    Decoder& decoder_;
    RowChooser rows_;
    TableInputs inputs_;
    int32_t* last_tokens_;
    const int width_;
    std::vector<int32_t> seats_, numbers_;
    std::vector<float> hidden_;

    std::mutex mutex_;
    std::condition_variable put_, ended_;
    std::vector<Job> jobs_;  // at most two: no deque, whose allocation has a new version in GCC 12
    std::vector<Result> results_;
    int64_t num_put_ = 0, num_ended_ = 0;
    bool stopping_ = false;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace penstock
