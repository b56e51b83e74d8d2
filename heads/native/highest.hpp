// The highest value of each row of logits.

#pragma once

#include "lanes.hpp"

namespace {

// A highest value, and the first place that has it.
struct Highest {
    float value;
    int64_t place;
};

// NaN is higher than all, and has no place.
template <typename A> Highest highest_of(const A* row, int64_t size) {
    constexpr int PARTS = 4;
    const Lanes lowest = Lanes{} - INFINITY;
    Lanes best[PARTS] = {lowest, lowest, lowest, lowest};
    Ints unordered = {};
    const auto read = [&](int64_t first) {
        const __mmask16 which = first_lanes(size - first);
        return (Lanes)_mm512_mask_mov_ps((__m512)lowest, which, (__m512)load_some(row + first, which));
    };
    for (int64_t first = 0; first < size; first += PARTS * LANES)
        for (int part = 0; part < PARTS; ++part) {
            const Lanes values = read(first + part * LANES);
            best[part] = values > best[part] ? values : best[part];
            unordered |= values != values;
        }
    if (_mm512_test_epi32_mask((__m512i)unordered, (__m512i)unordered)) return {NAN, 0};
    float value = -INFINITY;
    for (Lanes lanes : best) value = std::max(value, _mm512_reduce_max_ps((__m512)lanes));
    for (int64_t first = 0;; first += LANES)
        if (const __mmask16 found = _mm512_cmp_ps_mask((__m512)read(first), _mm512_set1_ps(value), _CMP_EQ_OQ))
            return {value, first + __builtin_ctz(found)};
}

// The probability that softmax gives the highest value of a row; where that is not finite, of an even distribution.
template <typename A> float probability_of(float highest, const A* row, int64_t size) {
    if (!std::isfinite(highest)) return 1.0f / float(size);
    Lanes total = {};
    for (int64_t first = 0; first < size; first += LANES) {
        const __mmask16 which = first_lanes(size - first);
        const Lanes values = exp_of(load_some(row + first, which) - highest);
        total += (Lanes)_mm512_maskz_mov_ps(which, (__m512)values);
    }
    return 1.0f / sum_of(total);
}

}  // namespace
