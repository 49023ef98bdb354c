// A double of the matrix unit of AMX, with its bits but for denormal numbers, which it does not flush: see tiles.h.
#pragma once

namespace penstock {

struct EmulatedTiles {
    const TileShapes* shapes;
    alignas(64) char data[8][kTileHeight][kTileBytes];
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles{};
    return tiles;
}

inline void use_tiles(const TileShapes& shapes) { emulated_tiles().shapes = &shapes; }

struct FlushedDenormals {
    FlushedDenormals() {}  // the double flushes none
};

template <int T>
void tile_zero() {
    std::memset(emulated_tiles().data[T], 0, sizeof emulated_tiles().data[T]);
}

template <int T>
void tile_load(const void* from, size_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    tile_zero<T>();
    for (int r = 0; r < tiles.shapes->rows[T]; r++)
        std::memcpy(tiles.data[T][r], static_cast<const char*>(from) + r * stride, tiles.shapes->row_bytes[T]);
}

template <int T>
void tile_load_streamed(const void* from, size_t stride) {
    tile_load<T>(from, stride);
}

template <int T>
void tile_store(void* to, size_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.shapes->rows[T]; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[T][r], tiles.shapes->row_bytes[T]);
}

template <int C, int A, int B>
void tile_dot_bf16() {
    EmulatedTiles& tiles = emulated_tiles();
    const int pairs = tiles.shapes->row_bytes[A] / 4;
    for (int r = 0; r < tiles.shapes->rows[C]; r++) {
        const BFloat* a = reinterpret_cast<const BFloat*>(tiles.data[A][r]);
        float* c = reinterpret_cast<float*>(tiles.data[C][r]);
        for (int j = 0; j < tiles.shapes->row_bytes[C] / 4; j += kLanes) {
            v8 even = splat(0.0f), odd = splat(0.0f);
            for (int i = 0; i < pairs; i++) {
                v8u both;
                std::memcpy(&both, tiles.data[B][i] + 4 * j, sizeof both);
                even = fma(splat(to_float(a[2 * i])), (v8)(both << 16), even);
                odd = fma(splat(to_float(a[2 * i + 1])), (v8)(both & splat_bits(0xffff0000u)), odd);
            }
            store(c + j, load(c + j) + (even + odd));
        }
    }
}

template <int C, int A, int B>
void tile_dot_int8() {
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.shapes->rows[C]; r++) {
        const int8_t* a = reinterpret_cast<const int8_t*>(tiles.data[A][r]);
        int32_t* c = reinterpret_cast<int32_t*>(tiles.data[C][r]);
        for (int i = 0; i < tiles.shapes->row_bytes[A]; i++)
            for (int j = 0; j < tiles.shapes->row_bytes[C] / 4; j++) {
                const int8_t* b = reinterpret_cast<const int8_t*>(tiles.data[B][i / 4]);
                c[j] += int32_t(a[i]) * b[4 * j + i % 4];
            }
    }
}

}  // namespace penstock
