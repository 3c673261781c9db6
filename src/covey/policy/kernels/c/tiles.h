/* Products of bfloat16 in tiles (Intel's AMX): 16 rows of 32 inputs times 32 inputs of 16 outputs in one instruction.

   A row's sums depend on nothing but the row, as elsewhere, but run in another order than those of vectors: all rows of a
   product go through tiles, or none. What works on panels is for layer.c, which has them. */

#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define TILE_PAIRS 16
#define AHEAD 1024 /* pairs from which on weights are fetched */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, for each tile */
    uint8_t rows[16];
} TileShapes;

static int may_use_tiles;

/* The kernel keeps tiles of a process that asked for them. */
__attribute__((constructor)) static void request_tiles(void) {
    may_use_tiles = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Every thread shapes its tiles before it multiplies, and releases them after it. */
INLINE void shape_tiles(void) {
    if (!may_use_tiles) return;
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.bytes[t] = 64, shapes.rows[t] = TILE_ROWS;
    _tile_loadconfig(&shapes);
}

INLINE void release_tiles(void) {
    if (may_use_tiles) _tile_release();
}

INLINE int goes_by_tiles(int64_t pairs) { return may_use_tiles && pairs % TILE_PAIRS == 0; }

#ifdef PANEL
/* Load the next inputs of a panel into tiles 6 and 7, and fetch the ones after. */
INLINE void load_panel(const uint32_t *panel) {
    for (int64_t line = 0; line < TILE_PAIRS * PANEL; line += 16) __builtin_prefetch(panel + line + AHEAD, 0, 3);
    _tile_loadd(6, panel, PANEL * 4);
    _tile_loadd(7, panel + LANES, PANEL * 4);
}

/* Sums of 16 rows, or of 32 where `last` is beyond, at x, `stride` pairs apart. All these rows are read, those behind
   `last` too: x has room for them, and their sums are nobody's. */
static __attribute__((noinline)) void multiply_tiles(const uint32_t *x, int64_t stride, int64_t pairs, int64_t last,
                                                     const uint32_t *panel, Sums out) {
    const int is_tall = last >= TILE_ROWS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < pairs; i += TILE_PAIRS) {
        load_panel(panel + i * PANEL);
        _tile_loadd(4, x + i, stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!is_tall) continue;
        _tile_loadd(5, x + TILE_ROWS * stride + i, stride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out[0], sizeof out[0]);
    _tile_stored(1, out[0] + 1, sizeof out[0]);
    if (!is_tall) return;
    _tile_stored(2, out[TILE_ROWS], sizeof out[0]);
    _tile_stored(3, out[TILE_ROWS] + 1, sizeof out[0]);
}
#endif

#else
INLINE void shape_tiles(void) {}
INLINE void release_tiles(void) {}
#endif

/* What each thread of a parallel region computes. */
#define IN_TILES(work)                                                                                                \
    {                                                                                                                 \
        shape_tiles();                                                                                                \
        work;                                                                                                         \
        release_tiles();                                                                                              \
    }
