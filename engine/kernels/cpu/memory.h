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

template <class T>
Buffer<T> allocate(size_t count) {
    const size_t bytes = (std::max<size_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, bytes);
    if (p == nullptr) throw std::bad_alloc();
    return Buffer<T>(static_cast<T*>(p));
}

// Asks for 2 MiB pages in memory that is not touched yet. Blocks of the cache are read in no order: with small pages
// nearly every one costs a walk through the page tables. What the system does not grant is done without.
inline void use_huge_pages(void* start, size_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kHuge = uintptr_t(2) << 20;
    const uintptr_t from = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + bytes) / kHuge * kHuge;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

}  // namespace penstock
