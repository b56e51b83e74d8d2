// Products by the machine's tiles (AMX): 16 outputs by 32 inputs of a weight in one operation, for 16 rows at the cost
// of one.
//
// Tiles multiply bfloat16 and sum in float32. A row in float32 goes in three parts, of eight bits of it each, which are
// all of it. Weights in blocks go as their numbers of steps, which bfloat16 holds, and each block's sum is scaled then.

#pragma once

#include "weights.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE = 16;           // rows, and outputs, that a tile takes
constexpr int64_t LANES_OF_TILE = 16;  // one for each of its lines of 64 bytes
constexpr int64_t TILE_BYTES = 16 * 64;

// The machine's eight tiles, while this lives: in 0 to 3 what 16 outputs come to for so many rows, in 4 and 5 these
// outputs' weights for 32 inputs, in 6 and 7 the rows' inputs.
class Tiles {
  public:
    explicit Tiles(int64_t num_rows) {
        const uint16_t columns = uint16_t(4 * num_rows);
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16];
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape{.row_bytes = {columns, columns, columns, columns, 64, 64, columns, columns}};
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
};

// Rows of inputs, of values of type A, as tiles: [groups of rows, pieces, parts, 16 pairs of inputs, rows of a group].
template <typename A> class TileInputs {
  public:
    static int64_t room(int64_t num_rows, int64_t size) {
        return num_groups(num_rows) * num_pieces(size) * PARTS * LANES_OF_TILE;
    }

    TileInputs(Lanes* room, int64_t num_rows, int64_t size)
        : num_rows(num_rows),
          groups(num_groups(num_rows)),
          width((num_rows + groups - 1) / groups),
          pieces(num_pieces(size)),
          tiles(reinterpret_cast<char*>(room)) {}

    // Zeros where the last group has no rows, whatever was there: with some numbers the machine takes far longer.
    void clear(int64_t piece) {
        const int64_t place = (groups - 1) * pieces + piece;
        if (num_rows < groups * width) std::memset(tiles + place * PARTS * tile_bytes(), 0, PARTS * tile_bytes());
    }

    void put(int64_t row, int64_t piece, Lanes first, Lanes second) {
        const int64_t place = row / width * pieces + piece, column = row % width;
        char* to = tiles + place * PARTS * tile_bytes() + column * 4;
        const __m512i pairs = _mm512_mullo_epi32(numbers(), _mm512_set1_epi32(int(width)));
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; ++part) {
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
            _mm512_i32scatter_epi32(to + part * tile_bytes(), pairs, both, 4);
            first -= widened(_mm512_castsi512_si256(both));
            second -= widened(_mm512_extracti64x4_epi64(both, 1));
        }
    }

  protected:
    static constexpr int PARTS = sizeof(A) == 4 ? 3 : 1;

    static int64_t num_groups(int64_t num_rows) { return (num_rows + TILE - 1) / TILE; }

    static Lanes widened(__m256i halves) {
        return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    }

    static __m512i numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    int64_t tile_bytes() const { return TILE * width * 4; }

    const char* tile(int64_t group, int64_t piece, int part) const {
        return tiles + ((group * pieces + piece) * PARTS + part) * tile_bytes();
    }

    // Of 16 outputs from `start` on those in [first, last), as the sums of all rows, [T, O]; `found`: [groups,
    // 16 outputs, 16 rows].
    void keep(const float* found, int64_t start, int64_t first, int64_t last, float* sums, int64_t num_outputs) const {
        const __mmask16 wanted = first_lanes(last - start) & ~first_lanes(first - start);
        const __m512i outputs = _mm512_slli_epi32(numbers(), 4);
        for (int64_t row = 0; row < num_rows; ++row) {
            const float* from = found + row / width * TILE * TILE + row % width;
            store_some(sums + row * num_outputs + start, wanted, (Lanes)_mm512_i32gather_ps(outputs, from, 4));
        }
    }

    const int64_t num_rows, groups, width, pieces;

  private:
    char* const tiles;
};

// With a weight in bfloat16 whose rows lie one behind the other.
template <typename A> class RowTileProduct : public TileInputs<A> {
  public:
    RowTileProduct(Lanes* room, int64_t num_rows, int64_t size)
        : TileInputs<A>(room, num_rows, size), row_bytes(size * 2) {}

    // The sums of outputs [first, last) for all rows, [T, O].
    void multiply(const char* weight, int64_t first, int64_t last, float* sums, int64_t num_outputs) const {
        const Tiles in_use(this->width);
        thread_local std::vector<Lanes> memory;
        float* found = reinterpret_cast<float*>(room_in(memory, 2 * this->groups * TILE));
        for (int64_t start = first / TILE * TILE; start < last; start += 2 * TILE) {
            // Two tiles of outputs at once: so many more of the weight's lines are on their way.
            const bool has_two = start + TILE < last;
            for (int64_t group = 0; group < this->groups; group += 2) {
                const bool are_two = group + 1 < this->groups;
                const char* rows = weight + start * row_bytes;
                const int64_t count = std::min(2 * TILE, num_outputs - start);
                if (has_two && are_two) multiply_tiles<2, 2>(rows, count, group, found);
                else if (has_two) multiply_tiles<2, 1>(rows, count, group, found);
                else if (are_two) multiply_tiles<1, 2>(rows, count, group, found);
                else multiply_tiles<1, 1>(rows, count, group, found);
            }
            this->keep(found, start, first, last, sums, num_outputs);
            if (has_two)
                this->keep(found + this->groups * TILE * TILE, start + TILE, first, last, sums, num_outputs);
        }
    }

  private:
    // O tiles of outputs with G groups of rows.
    template <int O, int G>
    void multiply_tiles(const char* rows, int64_t num_outputs, int64_t group, float* found) const {
        _tile_zero(0);
        if (G > 1) _tile_zero(1);
        if (O > 1) _tile_zero(2);
        if (O > 1 && G > 1) _tile_zero(3);
        alignas(64) char rest[TILE_BYTES];
        for (int64_t piece = 0; piece < this->pieces; ++piece) {
            const char* place = rows + piece * 64;
            const int64_t bytes = std::min<int64_t>(64, row_bytes - piece * 64);
            const auto padded = [&](int64_t first) {
                std::memset(rest, 0, sizeof rest);
                for (int64_t row = first; row < std::min(first + TILE, num_outputs); ++row)
                    std::memcpy(rest + (row - first) * 64, place + row * row_bytes, bytes);
                return rest;
            };
            if (num_outputs >= TILE && bytes == 64) _tile_loadd(4, place, row_bytes);
            else _tile_loadd(4, padded(0), 64);
            if (O > 1) {
                if (num_outputs >= 2 * TILE && bytes == 64) _tile_loadd(5, place + TILE * row_bytes, row_bytes);
                else _tile_loadd(5, padded(TILE), 64);
            }
#pragma GCC unroll 3
            for (int part = 0; part < this->PARTS; ++part) {
                _tile_loadd(6, this->tile(group, piece, part), this->width * 4);
                _tile_dpbf16ps(0, 4, 6);
                if (O > 1) _tile_dpbf16ps(2, 5, 6);
                if (G > 1) {
                    _tile_loadd(7, this->tile(group + 1, piece, part), this->width * 4);
                    _tile_dpbf16ps(1, 4, 7);
                    if (O > 1) _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        const auto to = [&](int64_t outputs, int64_t next) {
            return found + (outputs * this->groups + group + next) * TILE * TILE;
        };
        _tile_stored(0, to(0, 0), 64);
        if (G > 1) _tile_stored(1, to(0, 1), 64);
        if (O > 1) _tile_stored(2, to(1, 0), 64);
        if (O > 1 && G > 1) _tile_stored(3, to(1, 1), 64);
    }

    int64_t row_bytes;
};

// Blocks as tiles have them: of 16 outputs first the numbers, tile by tile, then the steps of each tile.

// Numbers of four bits: the four parts of a word are those of four rows, and 32 words their values; a step and a lowest
// value for each row, in float16.
struct FourBitTiles {
    static constexpr int BYTES = 256, STEP_BYTES = 64;
    static void widen(const char* numbers, char* tile) {
        alignas(64) static const uint16_t values[32] = {  // 0 to 15 in bfloat16, whatever bit 4 is
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
            0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
            0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
        const __m512i table = _mm512_load_si512(values);
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) {
            const __m512i words = _mm512_loadu_si512(numbers + four * 64);
#pragma GCC unroll 4
            for (int row = 0; row < 4; ++row)
                _mm512_store_si512(tile + (four * 4 + row) * 64,
                                   _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * row), table));
        }
    }
    static void steps(const char* from, float* steps, float* lowest) {
        const __m256i* halves = reinterpret_cast<const __m256i*>(from);
        _mm512_store_ps(steps, _mm512_cvtph_ps(_mm256_loadu_si256(halves)));
        _mm512_store_ps(lowest, _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)));
    }
    static constexpr bool HAS_LOWEST = true;
};

// Signed numbers of eight bits, and a step for each row, in float16.
struct EightBitTiles {
    static constexpr int BYTES = 512, STEP_BYTES = 32;
    static void widen(const char* numbers, char* tile) {
#pragma GCC unroll 16
        for (int row = 0; row < 16; ++row) {
            const __m128i_u* halves = reinterpret_cast<const __m128i_u*>(numbers + row * 32);
            const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[0]));
            const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[1]));
            _mm512_store_si512(tile + row * 64, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
    }
    static void steps(const char* from, float* steps, float*) {
        _mm512_store_ps(steps, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    }
    static constexpr bool HAS_LOWEST = false;
};

template <typename W> class BlockTileProduct : public TileInputs<float> {
  public:
    static int64_t room(int64_t num_rows, int64_t size) {
        return TileInputs::room(num_rows, size) + num_groups(num_rows) * num_pieces(size);
    }

    BlockTileProduct(Lanes* room, int64_t num_rows, int64_t size)
        : TileInputs(room, num_rows, size),
          totals(reinterpret_cast<float*>(room + TileInputs::room(num_rows, size))) {}

    void clear(int64_t piece) {
        TileInputs::clear(piece);
        std::memset(totals + ((groups - 1) * pieces + piece) * TILE, 0, TILE * sizeof(float));
    }

    void put(int64_t row, int64_t piece, Lanes first, Lanes second) {
        TileInputs::put(row, piece, first, second);
        totals[(row / width * pieces + piece) * TILE + row % width] = sum_of(first + second);
    }

    // The sums of outputs [first, last) for all rows, [T, O].
    void multiply(const char* weight, int64_t first, int64_t last, float* sums, int64_t num_outputs) const {
        const Tiles in_use(width);
        thread_local std::vector<Lanes> memory;
        Lanes* found = room_in(memory, groups * TILE);
        const int64_t bytes = pieces * (W::BYTES + W::STEP_BYTES);
        Blocks blocks = {};
        for (int64_t start = first / TILE * TILE; start < last; start += TILE) {
            for (int64_t group = 0; group < groups; ++group)
                multiply_group(weight + start / TILE * bytes, group, blocks, found + group * TILE);
            keep(reinterpret_cast<const float*>(found), start, first, last, sums, num_outputs);
        }
    }

  private:
    // Between a tile's being stored and its being loaded, so many others: the machine waits where it comes at once.
    static constexpr int64_t AHEAD = 2, BEHIND = 1, KEPT = 4;

    // What comes of a tile, [16 outputs, 16 rows]; zeros where there are no rows.
    struct Blocks {
        alignas(64) float sums[KEPT][TILE * TILE];
    };

    // `found`: [16 outputs, 16 rows].
    void multiply_group(const char* numbers, int64_t group, Blocks& blocks, Lanes* found) const {
        constexpr int64_t PIECE_BYTES = W::BYTES + W::STEP_BYTES;
        alignas(64) char wide[KEPT][TILE_BYTES];
        alignas(64) float steps[KEPT][TILE], lowest[KEPT][TILE];
        const int64_t num_pieces = pieces, row_bytes = width * 4, bytes = tile_bytes();
        const char* at = numbers + num_pieces * W::BYTES;
        const char* inputs = tile(group, 0, 0);
        const float* sums_of_inputs = totals + group * num_pieces * TILE;
        Lanes total[TILE] = {};
        for (int64_t piece = -AHEAD; piece < num_pieces + BEHIND; ++piece) {
            if (const int64_t next = piece + AHEAD; next < num_pieces) {
                // What comes after these outputs.
                for (int64_t line = 0; line < PIECE_BYTES; line += 64)
                    __builtin_prefetch(numbers + (num_pieces + next) * PIECE_BYTES + line);
                W::widen(numbers + next * W::BYTES, wide[next % KEPT]);
                W::steps(at + next * W::STEP_BYTES, steps[next % KEPT], lowest[next % KEPT]);
            }
            if (piece >= 0 && piece < num_pieces) {
                _tile_zero(0);
                _tile_loadd(4, wide[piece % KEPT], 64);
                for (int part = 0; part < PARTS; ++part, inputs += bytes) {
                    _tile_loadd(6, inputs, row_bytes);
                    _tile_dpbf16ps(0, 4, 6);
                }
                _tile_stored(0, blocks.sums[piece % KEPT], 64);
            }
            if (const int64_t last = piece - BEHIND; last >= 0) {
                const float* block = blocks.sums[last % KEPT];
                const Lanes sum = load(sums_of_inputs + last * TILE);
#pragma GCC unroll 16
                for (int output = 0; output < TILE; ++output) {
                    total[output] += load(block + output * TILE) * steps[last % KEPT][output];
                    if (W::HAS_LOWEST) total[output] += sum * lowest[last % KEPT][output];
                }
            }
        }
#pragma GCC unroll 16
        for (int output = 0; output < TILE; ++output) found[output] = total[output];
    }

    float* totals;  // of a piece's inputs, [groups, pieces, 16 rows]
};

// Linux lets a process use tiles when it has asked.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // namespace

#else

namespace {

inline bool may_use_tiles() { return false; }

}  // namespace

#endif
