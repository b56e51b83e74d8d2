// Weights whose rows lie one behind the other, and their products with few rows of inputs, in lanes.
//
// A kind says how many bytes hold 32 values of a row, how these become two times 16 lanes of float32, and which input
// belongs to which lane.

#pragma once

#include <algorithm>

#include "lanes.hpp"

namespace {

constexpr int PIECE = 2 * LANES;

// Of a row of inputs, the last maybe in part.
inline int64_t num_pieces(int64_t size) { return (size + PIECE - 1) / PIECE; }

struct Float32Weight {
    static constexpr int BYTES = 4 * PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        std::memcpy(&first, from, sizeof first);
        std::memcpy(&second, from + sizeof first, sizeof second);
    }
    static void arrange(Lanes&, Lanes&) {}
};

struct Bfloat16Weight {
    static constexpr int BYTES = 2 * PIECE;
    // Pairs of values as they lie: the lower one moved up, and the upper one by itself.
    static void widen(const char* from, Lanes& first, Lanes& second) {
        Bits pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        first = (Lanes)(pairs << 16);
        second = (Lanes)(pairs & 0xffff0000u);
    }
    static void arrange(Lanes& first, Lanes& second) {
        const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const Lanes whole = first;
        first = __builtin_shuffle(whole, second, even);
        second = __builtin_shuffle(whole, second, even + 1);
    }
};

struct Float16Weight {
    static constexpr int BYTES = 2 * PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        first = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        second = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1));
    }
    static void arrange(Lanes&, Lanes&) {}
};

inline float half_at(const char* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// A step and a lowest value in float16, then 32 numbers of steps of four bits: byte j has those of values j and j + 16.
struct FourBitWeight {
    static constexpr int BYTES = 4 + PIECE / 2;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        const Lanes numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512 values = (__m512)(numbers * half_at(from) + half_at(from + 2));
        const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4)));
        first = (Lanes)_mm512_permutexvar_ps(pairs, values);
        second = (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values);
    }
    static void arrange(Lanes&, Lanes&) {}
};

// A step in float16, then 32 signed numbers of steps of eight bits.
struct EightBitWeight {
    static constexpr int BYTES = 2 + PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        const __m128i_u* halves = reinterpret_cast<const __m128i_u*>(from + 2);
        first = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[0])) * half_at(from);
        second = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[1])) * half_at(from);
    }
    static void arrange(Lanes&, Lanes&) {}
};

// Inputs of a product in the order of its weight, padded with zeros to whole pieces, and the product.
template <typename W> class LaneProduct {
  public:
    static int64_t room(int64_t num_rows, int64_t size) { return num_rows * num_pieces(size) * 2; }

    LaneProduct(Lanes* room, int64_t num_rows, int64_t size)
        : inputs(reinterpret_cast<float*>(room)), num_rows(num_rows), size(size), stride(num_pieces(size) * PIECE) {}

    void clear(int64_t) {}

    void put(int64_t row, int64_t piece, Lanes first, Lanes second) {
        W::arrange(first, second);
        float* to = inputs + row * stride + piece * PIECE;
        std::memcpy(to, &first, sizeof first);
        std::memcpy(to + LANES, &second, sizeof second);
    }

    // The sums of outputs [first, last) for all rows, [T, O].
    void multiply(const char* weight, int64_t first, int64_t last, float* sums, int64_t num_outputs) const {
        constexpr int64_t TOGETHER = 16;  // outputs whose weights stay near while the rows come by
        constexpr int64_t MOST = 8;       // rows by one reading; of more, equal parts, for a lone row costs most
        for (int64_t start = first; start < last; start += TOGETHER) {
            const int64_t stop = std::min(start + TOGETHER, last);
            const int64_t num_parts = (num_rows + MOST - 1) / MOST;
            for (int64_t part = 0; part < num_parts; ++part) {
                const int64_t row = num_rows * part / num_parts, next = num_rows * (part + 1) / num_parts;
                const auto some = [&]<int T>() { outputs_of<T>(weight, row, start, stop, sums, num_outputs); };
                switch (next - row) {
                    case 1: some.template operator()<1>(); break;
                    case 2: some.template operator()<2>(); break;
                    case 3: some.template operator()<3>(); break;
                    case 4: some.template operator()<4>(); break;
                    case 5: some.template operator()<5>(); break;
                    case 6: some.template operator()<6>(); break;
                    case 7: some.template operator()<7>(); break;
                    case 8: some.template operator()<8>(); break;
                }
            }
        }
    }

  private:
    template <int T>
    void outputs_of(const char* weight, int64_t row, int64_t first, int64_t last, float* sums,
                    int64_t num_outputs) const {
        constexpr int R = T == 1 ? 8 : T <= 4 ? 4 : 16 / T;  // as many sums as the machine has room for
        const int64_t row_bytes = size * W::BYTES / PIECE;
        const float* rows = inputs + row * stride;
        sums += row * num_outputs;
        int64_t output = first;
        for (; output + R <= last; output += R)
            sums_of_outputs<R, T>(weight + output * row_bytes, rows, sums + output, num_outputs);
        for (; output < last; ++output)
            sums_of_outputs<1, T>(weight + output * row_bytes, rows, sums + output, num_outputs);
    }

    // The sums of R outputs for T rows, [T, R] in `sums`.
    template <int R, int T>
    void sums_of_outputs(const char* weight, const float* rows, float* sums, int64_t num_outputs) const {
        Lanes total[R][T] = {};
        const int64_t whole = size / PIECE, row_bytes = size * W::BYTES / PIECE;
        for (int64_t piece = 0; piece < whole; ++piece) {
            Lanes first[T], second[T];
#pragma GCC unroll 8
            for (int row = 0; row < T; ++row) {
                first[row] = load(rows + row * stride + piece * PIECE);
                second[row] = load(rows + row * stride + piece * PIECE + LANES);
            }
#pragma GCC unroll 8
            for (int output = 0; output < R; ++output) {
                const char* place = weight + output * row_bytes + piece * W::BYTES;
                // What comes after these: the machine's own look-ahead loses so many short streams.
                for (int line = 0; line < W::BYTES; line += 64) __builtin_prefetch(place + R * row_bytes + line);
                Lanes lower, upper;
                W::widen(place, lower, upper);
#pragma GCC unroll 8
                for (int row = 0; row < T; ++row) {
                    total[output][row] += lower * first[row];
                    total[output][row] += upper * second[row];
                }
            }
        }
        if (whole * PIECE < size)
#pragma GCC unroll 8
            for (int output = 0; output < R; ++output) {
                char rest[W::BYTES] = {};
                std::memcpy(rest, weight + output * row_bytes + whole * W::BYTES, row_bytes - whole * W::BYTES);
                Lanes lower, upper;
                W::widen(rest, lower, upper);
#pragma GCC unroll 8
                for (int row = 0; row < T; ++row) {
                    total[output][row] += lower * load(rows + row * stride + whole * PIECE);
                    total[output][row] += upper * load(rows + row * stride + whole * PIECE + LANES);
                }
            }
        Lanes many[16] = {};
#pragma GCC unroll 8
        for (int output = 0; output < R; ++output)
#pragma GCC unroll 8
            for (int row = 0; row < T; ++row) many[row * R + output] = total[output][row];
        const Lanes found = sums_of(many);
#pragma GCC unroll 8
        for (int output = 0; output < R; ++output)
#pragma GCC unroll 8
            for (int row = 0; row < T; ++row) {
                const int place = row * R + output;
                sums[row * num_outputs + output] = found[place % 4 * 4 + place / 4];
            }
    }

    float* inputs;  // [T, stride]
    int64_t num_rows, size, stride;
};

}  // namespace
