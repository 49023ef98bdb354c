// Products of tiles, C += A B: the matrix unit of AMX, or a double of it that gives the same bits, which tests bring along.
//
// There are eight tiles of at most 16 rows of 64 bytes. A holds rows of activations, [rows][k]; B holds weights with
// neighbours in k side by side, bfloat16 as [k/2][columns][2] and int8 as [k/4][columns][4]; C holds sums,
// [rows][columns] float32 or int32.
//
// A product of bfloat16 has an order of its own: the even k of a tile are one chain of fused multiply-adds from 0, the
// odd k another, and even + odd is added to C. Products of two bfloat16 are exact in float32, so that a machine
// without fused multiply-adds gets the same. (Intel's manual, TDPBF16PS; the unit also flushes denormal numbers, the
// double does not.) Products of int8 are exact.
#pragma once

#include "simd.h"

#if defined(PENSTOCK_TILES_HEADER)
#define PENSTOCK_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PENSTOCK_TILES 1
#define PENSTOCK_AMX 1
#endif

#if PENSTOCK_TILES

namespace penstock {

constexpr int kTileBytes = 64;  // of a row
constexpr int kTileHeight = 16;

// What the eight tiles hold. The layout is the processor's: palette 1, then bytes per row and rows of each tile.
struct alignas(64) TileShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64);

constexpr TileShapes kWholeTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

}  // namespace penstock

#if PENSTOCK_AMX

namespace penstock {

// Every thread has tiles of its own; they are undefined after this. It is called for every piece of work: other
// libraries use the tiles of the same thread, and leave them in a state of their own.
PENSTOCK_INLINE void use_tiles(const TileShapes& shapes) {
    // Not the compiler's intrinsic: GCC 12's says that it reads 8 bytes, and leaves the others unwritten.
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}

template <int T>
PENSTOCK_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// While it lives, this thread's vectors flush denormal numbers as tiles do, operands and results. It takes time, so it
// is for a whole piece of work. What it is to hold for must be read from memory and written back in that time, or the
// compiler may move it out.
class FlushedDenormals {
   public:
    FlushedDenormals() {
        asm volatile("stmxcsr %0" : "=m"(before_));
        control(before_ | 0x8040);
    }
    FlushedDenormals(const FlushedDenormals&) = delete;
    ~FlushedDenormals() { control(before_); }

   private:
    static void control(uint32_t bits) { asm volatile("ldmxcsr %0" ::"m"(bits) : "memory"); }

    uint32_t before_;
};

// The stride is in bytes.
template <int T>
PENSTOCK_INLINE void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}

// The same of what is read again, but after more than the first-level cache holds: as a hint, it leaves that to others.
template <int T>
PENSTOCK_INLINE void tile_load_streamed(const void* from, size_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}

template <int T>
PENSTOCK_INLINE void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}

template <int C, int A, int B>
PENSTOCK_INLINE void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
PENSTOCK_INLINE void tile_dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace penstock

#else
#include PENSTOCK_TILES_HEADER
#endif

#endif  // PENSTOCK_TILES
