// A team of threads that runs a program: a list of phases, each a number of independent chunks.
//
// Chunks are claimed one by one, and a phase ends when its chunks are done, not when the threads have arrived: a
// thread that lost its core while it held no chunk is not waited for, and one that wakes late joins at whatever
// phase is then open. All of that is one 64-bit ticket: the number of the open phase above, its unclaimed chunks
// below. A claim is a compare-and-swap, so whoever succeeds knows that the phase was open, that it cannot end
// before this chunk is done, and so that the program (owned by the caller of `run`) is still there to be read.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.h"

namespace penstock {

struct Phase {
    void (*run)(void* job, uint32_t argument, uint32_t chunk, int worker);
    uint32_t argument;
    uint32_t chunks;
};

class Team {
   public:
    // Every worker gets so many bytes of scratch.
    Team(int size, size_t scratch) : size_(size), owner_(getpid()) {
        for (int worker = 0; worker < size; worker++) scratch_.push_back(allocate<char>(scratch));
        try {
            for (int worker = 1; worker < size; worker++)
                threads_.emplace_back([this, worker] { work(worker, /*caller=*/false); });
        } catch (...) {
            stop();  // a thread that is destroyed before it is joined ends the process
            throw;
        }
    }

    ~Team() { stop(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Belongs to the chunk that this worker is running, and holds nothing once that chunk is done.
    float* scratch(int worker) const { return reinterpret_cast<float*>(scratch_[worker].get()); }

    // False after a fork: the threads stayed behind. The child works alone, and must not destroy the team, whose
    // condition variable would wait for them.
    bool is_whole() const { return getpid() == owner_; }

    // Runs the phases one after another, the caller as worker 0. One program at a time; others wait their turn.
    void run(void* job, const Phase* phases, size_t count) {
        std::lock_guard<std::mutex> turn(turn_);
        if (count == 0) return;
        if (size_ == 1 || !is_whole()) return run_alone(job, phases, count);
        job_ = job;
        phases_ = phases;
        count_ = static_cast<uint32_t>(count);
        first_ = number_of(ticket_.load()) + 1;
        open(first_);
        work(0, /*caller=*/true);
    }

   private:
    void stop() {
        stopping_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    static uint32_t number_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
    static uint32_t unclaimed(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

    static void run_alone(void* job, const Phase* phases, size_t count) {
        for (const Phase* phase = phases; phase < phases + count; phase++)
            for (uint32_t chunk = 0; chunk < phase->chunks; chunk++) phase->run(job, phase->argument, chunk, 0);
    }

    void work(int worker, bool caller) {
        for (;;) {
            uint64_t ticket = ticket_.load(std::memory_order_acquire);
            if (unclaimed(ticket) == 0) {
                if (caller ? number_of(ticket) - first_ == count_ : stopping_.load()) return;
                wait_for_change(ticket);
            } else if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
                const Phase& phase = phases_[number_of(ticket) - first_];
                const uint32_t chunks = phase.chunks;
                phase.run(job_, phase.argument, chunks - unclaimed(ticket), worker);
                if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) open(number_of(ticket) + 1);
            }
        }
    }

    // The number one past the last phase, without chunks, is the end of the program.
    void open(uint32_t number) {
        const uint32_t index = number - first_;
        const uint32_t chunks = index < count_ ? phases_[index].chunks : 0;
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(uint64_t(number) << 32 | chunks);
        if (chunks != 1 && sleepers_.load() > 0) wake();  // a single chunk is this thread's own
    }

    void wake() {
        { std::lock_guard<std::mutex> lock(sleep_); }
        changed_.notify_all();
    }

    bool is(uint64_t ticket) const { return ticket_.load() == ticket && !stopping_.load(); }

    void wait_for_change(uint64_t ticket) {
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 16; i++) {
                if (!is(ticket)) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        changed_.wait(lock, [&] { return !is(ticket); });
        sleepers_.fetch_sub(1);
    }

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb" ::: "memory");
#endif
    }

    // Long enough to bridge the ends of phases. No longer: when another process has taken a core, and with it a
    // thread in the middle of its chunk, sleeping here is what lets the system move that thread to this core.
    static constexpr std::chrono::microseconds kSpin{20};

    const int size_;
    const pid_t owner_;
    std::vector<Buffer<char>> scratch_;
    std::mutex turn_;

    void* job_ = nullptr;
    const Phase* phases_ = nullptr;
    uint32_t count_ = 0;
    uint32_t first_ = 1;

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;  // last: they use all of the above
};

// Chunks of work without a type of its own: run(team, n, [&](uint32_t chunk, int worker) { ... }).
template <class Function>
void run_chunks(Team& team, uint32_t chunks, Function function) {
    const auto call = [](void* job, uint32_t, uint32_t chunk, int worker) {
        (*static_cast<Function*>(job))(chunk, worker);
    };
    const Phase phase{call, 0, chunks};
    if (chunks > 0) team.run(&function, &phase, 1);
}

}  // namespace penstock
