// A team of threads that runs a program: a list of phases, each a number of independent chunks.
//
// Chunks are claimed one by one, and a phase ends when its chunks are done, not when the threads have arrived: a
// thread that lost its core while it held no chunk is not waited for, and one that wakes late joins at whatever
// phase is then open. All of that is one 64-bit ticket: the number of the open phase above, its unclaimed chunks
// below. A claim is a compare-and-swap, so whoever succeeds knows that the phase was open, that it cannot end
// before this chunk is done, and so that the program (owned by the caller of `run`) is still there to be read.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.h"

namespace penstock {

// What a phase is a part of; library.py has the names in the same order.
enum class Kind : uint32_t {
    other,
    embed,
    norm,
    prepare,
    qkv,
    place,
    attention,
    o,
    gate_up,
    down,
    gather,
    head,  // a linear that is a program of its own
    route,
    combine,
    gates,  // what a layer reads beside queries, keys and values
    conv,
    state,
};
constexpr int kKinds = 17;

struct Phase {
    void (*run)(void* job, uint32_t argument, uint32_t chunk, int worker);
    uint32_t argument;
    uint32_t chunks;
    Kind kind = Kind::other;
};

// What the phases of one kind took since the team began to time itself.
struct KindTime {
    int64_t open_ns;  // from the opening of each phase to the opening of the next
    int64_t busy_ns;  // in their chunks, summed over the threads
    int64_t phases;
};

class Team {
   public:
    // Every worker gets so many bytes of scratch.
    Team(int size, size_t scratch) : size_(size), owner_(getpid()), busy_(size) {
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

    // Where its weights lie.
    SharedPages& pages() { return pages_; }

    // False after a fork: the threads stayed behind. The child works alone, and must not destroy the team, whose
    // condition variable would wait for them.
    bool is_whole() const { return getpid() == owner_; }

    // Runs the phases one after another, the caller as worker 0. One program at a time; others wait their turn.
    void run(void* job, const Phase* phases, size_t count) {
        std::lock_guard<std::mutex> turn(turn_);
        if (count == 0) return;
        job_ = job;
        phases_ = phases;
        count_ = static_cast<uint32_t>(count);
        if (size_ == 1 || !is_whole()) return run_alone();
        first_ = number_of(ticket_.load()) + 1;
        open(first_);
        work(0, /*caller=*/true);
    }

    // Every time starts from 0 when timing is switched on. While it is off, as at first, nobody reads the clock.
    void time(bool on) {
        std::lock_guard<std::mutex> turn(turn_);
        is_timed_ = on;
        if (!on) return;
        open_ = {};
        std::fill(busy_.begin(), busy_.end(), Busy{});
    }

    // Writes what each kind took, [kKinds].
    void times(KindTime* out) {
        std::lock_guard<std::mutex> turn(turn_);
        for (int kind = 0; kind < kKinds; kind++) {
            out[kind] = {open_[kind].ns, 0, open_[kind].phases};
            for (const Busy& busy : busy_) out[kind].busy_ns += busy.ns[kind];
        }
    }

   private:
    struct Open {
        int64_t ns, phases;
    };

    struct alignas(64) Busy {
        std::array<int64_t, kKinds> ns{};
    };

    void stop() {
        stopping_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    static uint32_t number_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
    static uint32_t unclaimed(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

    void run_alone() {
        for (uint32_t index = 0; index < count_; index++) {
            note_opening(index);
            for (uint32_t chunk = 0; chunk < phases_[index].chunks; chunk++) run_chunk(phases_[index], chunk, 0);
        }
        note_opening(count_);
    }

    void run_chunk(const Phase& phase, uint32_t chunk, int worker) {
        if (!is_timed_) return phase.run(job_, phase.argument, chunk, worker);
        const int64_t start = now_ns();
        phase.run(job_, phase.argument, chunk, worker);
        busy_[worker].ns[static_cast<int>(phase.kind)] += now_ns() - start;
    }

    // One reading of the clock ends a phase and begins the next. No two threads are here at once: a phase is opened
    // by the thread that finished the last chunk of the phase before.
    void note_opening(uint32_t index) {
        if (!is_timed_) return;
        const int64_t now = now_ns();
        if (index > 0) {
            Open& open = open_[static_cast<int>(phases_[index - 1].kind)];
            open.ns += now - opened_ns_;
            open.phases++;
        }
        opened_ns_ = now;
    }

    static int64_t now_ns() {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
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
                run_chunk(phase, chunks - unclaimed(ticket), worker);
                if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) open(number_of(ticket) + 1);
            }
        }
    }

    // The number one past the last phase, without chunks, is the end of the program.
    void open(uint32_t number) {
        const uint32_t index = number - first_;
        const uint32_t chunks = index < count_ ? phases_[index].chunks : 0;
        note_opening(index);
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
        // What changed_.wait does; GCC 12 gives that function a new version, which older systems' libstdc++ lacks.
        while (is(ticket)) pthread_cond_wait(changed_.native_handle(), sleep_.native_handle());
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
    SharedPages pages_;
    std::mutex turn_;

    void* job_ = nullptr;
    const Phase* phases_ = nullptr;
    uint32_t count_ = 0;
    uint32_t first_ = 1;

    bool is_timed_ = false;
    int64_t opened_ns_ = 0;  // when the phase in work opened
    std::array<Open, kKinds> open_{};
    std::vector<Busy> busy_;  // per worker

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
void run_chunks(Team& team, uint32_t chunks, Function function, Kind kind = Kind::other) {
    const auto call = [](void* job, uint32_t, uint32_t chunk, int worker) {
        (*static_cast<Function*>(job))(chunk, worker);
    };
    const Phase phase{call, 0, chunks, kind};
    if (chunks > 0) team.run(&function, &phase, 1);
}

}  // namespace penstock
