// The tile registers of AMX: 8 of up to 16 lines of 64 bytes, whose shapes are configured.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__)

namespace kvern {
namespace KVERN_ISA {

// As the instruction that configures wants it.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct TileShape {
  int rows, bytes;
};

KVERN_INLINE void configure_tiles(const TileShape (&shapes)[8]) {
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; i++) {
    config.rows[i] = (uint8_t)shapes[i].rows;
    config.row_bytes[i] = (uint16_t)shapes[i].bytes;
  }
  // The intrinsic names a part of the struct as what it reads.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Tiles 0 to 3 hold sums, for all that is computed here.
KVERN_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The first n of them, 16 columns each, one beside the other.
KVERN_INLINE void store_beside(float* out, int64_t row_bytes, int n) {
  _tile_stored(0, out, row_bytes);
  if (n > 1) _tile_stored(1, out + kLanes, row_bytes);
  if (n > 2) _tile_stored(2, out + 2 * kLanes, row_bytes);
  if (n > 3) _tile_stored(3, out + 3 * kLanes, row_bytes);
}

// The unit that multiplies tiles falls asleep when it has had nothing to do for about 400 ns, and takes 300 ns to wake
// up, longer after a longer sleep. To be called at shorter intervals by who is busy with other things in between. (Not
// too often: vector instructions take twice as long beside it.) Multiplies tiles 4 and 6 and leaves anything in tile 0.
KVERN_INLINE void keep_tiles_awake() { _tile_dpbf16ps(0, 4, 6); }

}  // namespace KVERN_ISA
}  // namespace kvern

#endif
