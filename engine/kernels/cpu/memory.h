// Memory that is aligned to cache lines and freed by its owner.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace penstock {

// Memory that has parts, and is freed with the last of them.
struct Whole {
    char* start;
    std::atomic<size_t> parts{1};

    void let_go() {
        if (parts.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        std::free(start);
        delete this;
    }
};

// Frees memory, or lets go of what it is a part of.
template <class T>
struct Freed {
    Whole* whole = nullptr;

    void operator()(T* p) const { whole ? whole->let_go() : std::free(p); }
};

template <class T>
using Buffer = std::unique_ptr<T[], Freed<T>>;

constexpr size_t kHugePage = size_t(2) << 20;

// Asks for 2 MiB pages in memory that is not touched yet. Blocks of the cache are read in no order: with small pages
// nearly every one costs a walk through the page tables. What the system does not grant is done without.
inline void use_huge_pages(void* start, size_t bytes) {
#if defined(__linux__)
    const uintptr_t from = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + bytes) / kHugePage * kHugePage;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

// Large memory starts at a huge page and asks for as many as it fills.
template <class T>
Buffer<T> allocate(size_t count) {
    const size_t bytes = (std::max<size_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
    void* p = std::aligned_alloc(bytes < kHugePage ? 64 : kHugePage, bytes);
    if (p == nullptr) throw std::bad_alloc();
    use_huge_pages(p, bytes);
    return Buffer<T>(static_cast<T*>(p));
}

// The same, rounded up to whole huge pages where it is half of one at least: for what is read and written all the time.
template <class T>
Buffer<T> allocate_hot(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kHugePage / 2) return allocate<T>(count);
    return allocate<T>((bytes + kHugePage - 1) / kHugePage * kHugePage / sizeof(T));
}

// Memory for what stays for long and is small beside a huge page: pieces share those, and a piece is freed with the last
// of its neighbours.
class SharedPages {
   public:
    SharedPages() = default;
    SharedPages(const SharedPages&) = delete;
    ~SharedPages() {
        if (whole_) whole_->let_go();
    }

    template <class T>
    Buffer<T> allocate(size_t count) {
        const size_t bytes = (std::max<size_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
        if (bytes > kMostOfPiece) return penstock::allocate<T>(count);
        std::lock_guard<std::mutex> turn(turn_);
        if (!whole_ || used_ + bytes > kWhole) {
            if (whole_) whole_->let_go();
            whole_ = new Whole{penstock::allocate<char>(kWhole).release()};
            used_ = 0;
        }
        char* piece = whole_->start + used_;
        used_ += bytes;
        whole_->parts.fetch_add(1, std::memory_order_relaxed);
        return Buffer<T>(reinterpret_cast<T*>(piece), Freed<T>{whole_});
    }

   private:
    static constexpr size_t kWhole = size_t(64) << 20, kMostOfPiece = size_t(8) << 20;

    std::mutex turn_;
    Whole* whole_ = nullptr;
    size_t used_ = 0;
};

}  // namespace penstock
