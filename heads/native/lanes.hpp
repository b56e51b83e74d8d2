// Sixteen values of float32 side by side, and what is kept of them in a type.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <immintrin.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "made for AVX-512"
#endif

namespace {

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

struct Bfloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

template <typename A> inline A from_float(float value);

template <> inline float from_float<float>(float value) { return value; }

template <> inline Bfloat16 from_float<Bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// What is left of a value that is kept as an A.
template <typename A> inline float rounded(float value) { return to_float(from_float<A>(value)); }

template <typename A> inline Lanes rounded(Lanes values);

template <> inline Lanes rounded<float>(Lanes values) { return values; }

template <> inline Lanes rounded<Bfloat16>(Lanes values) {
    const Bits bits = (Bits)values;
    const Bits kept = values == values ? (bits + 0x7fffu + ((bits >> 16) & 1u)) : (bits | 0x400000u);
    return (Lanes)(kept & 0xffff0000u);
}

// Of `count` lanes, those that exist.
inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
}

inline Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline Lanes load_some(const float* from, __mmask16 which) { return (Lanes)_mm512_maskz_loadu_ps(which, from); }

inline Lanes load_some(const Bfloat16* from, __mmask16 which) {
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16);
}

inline void store_some(float* to, __mmask16 which, Lanes values) {
    _mm512_mask_storeu_ps(to, which, (__m512)values);
}

inline void store_some(Bfloat16* to, __mmask16 which, Lanes values) {
    const Bits upper = (Bits)rounded<Bfloat16>(values) >> 16;
    _mm256_mask_storeu_epi16(to, which, _mm512_cvtepi32_epi16((__m512i)upper));
}

inline float sum_of(Lanes lanes) { return _mm512_reduce_add_ps((__m512)lanes); }

// The sums of 16 lanes each, of `many[4 * g + c]` in lane `4 * c + g`; whatever the others are, each in one order.
inline Lanes sums_of(const Lanes (&many)[16]) {
#define HALVES(shuffle, a, b, lower, upper) (shuffle(a, b, lower) + shuffle(a, b, upper))
    __m512 groups[4];
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
        const Lanes* of = many + 4 * group;
        __m512 first = HALVES(_mm512_shuffle_f32x4, (__m512)of[0], (__m512)of[1], 0x44, 0xee);
        __m512 second = HALVES(_mm512_shuffle_f32x4, (__m512)of[2], (__m512)of[3], 0x44, 0xee);
        groups[group] = HALVES(_mm512_shuffle_f32x4, first, second, 0x88, 0xdd);
    }
    __m512 first = HALVES(_mm512_shuffle_ps, groups[0], groups[1], 0x44, 0xee);
    __m512 second = HALVES(_mm512_shuffle_ps, groups[2], groups[3], 0x44, 0xee);
    return (Lanes)HALVES(_mm512_shuffle_ps, first, second, 0x88, 0xdd);
#undef HALVES
}

// e^x within two units in the last place; 0 far below, infinite from 2^127.5 on.
inline Lanes exp_of(Lanes x) {
    const Lanes lowest = Lanes{} - 87.0f, highest = Lanes{} + 88.37f;
    const Ints is_low = x < lowest, is_high = x > highest;
    x = is_low ? lowest : x;
    x = is_high ? highest : x;
    Lanes halves = x * 1.44269504f;
    Ints whole = __builtin_convertvector(halves + (halves < Lanes{} ? Lanes{} - 0.5f : Lanes{} + 0.5f), Ints);
    Lanes n = __builtin_convertvector(whole, Lanes);
    Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (whole + 127) << 23;
    Lanes result = p * (Lanes)power;
    return is_low ? Lanes{} : is_high ? Lanes{} + INFINITY : result;
}

// Room for so many values; it stays, as large as it ever was.
template <typename T> inline T* room_in(std::vector<T>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(count);
    return memory.data();
}

}  // namespace
