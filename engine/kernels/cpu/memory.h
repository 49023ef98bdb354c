// Memory that is aligned to cache lines and freed by its owner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace penstock {

template <class T>
struct Freed {
    void operator()(T* p) const { std::free(p); }
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

}  // namespace penstock
