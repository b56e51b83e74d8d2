// Attention of rows over keys and values that lie in blocks.

#pragma once

#include "products.hpp"

extern "C" {

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
};

// Elements from a row to the next.
struct Strides {
    int64_t queries, keys, values;
};

// Where rows stand: each in one of the sequences, at a position of it. [T], [T], and [B, n] blocks.
struct Places {
    const int64_t *sequences, *positions, *tables;
    int64_t blocks_per_table, block_size;
    int64_t slot(int64_t row, int64_t position) const {
        const int64_t* table = tables + sequences[row] * blocks_per_table;
        return table[position / block_size] * block_size + position % block_size;
    }
};

}  // extern "C"

namespace {

// One query head over the keys and values that lie `offsets` behind these. PARTS lanes are a head; 0 is any number.
template <typename A, int PARTS>
void attend(const A* query, const A* keys, const A* values, const int64_t* offsets, int64_t num_keys,
            int64_t head_dim, float scaling, A* output) {
    const int64_t num_parts = PARTS ? PARTS : (head_dim + LANES - 1) / LANES;
    const __mmask16 all = 0xffff, rest = !PARTS && head_dim % LANES ? (1 << head_dim % LANES) - 1 : all;
    const auto which = [&](int64_t part) { return PARTS || part + 1 < num_parts ? all : rest; };
    const int64_t num_groups = (num_keys + LANES - 1) / LANES;
    thread_local std::vector<Lanes> memory;
    Lanes *const wide = room_in(memory, num_parts + num_groups), *const scores = wide + num_parts;
    for (int64_t part = 0; part < num_parts; ++part) wide[part] = load_some(query + part * LANES, which(part));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Lanes largest = Lanes{} - INFINITY;
    for (int64_t start = 0; start < num_keys; start += LANES) {
        const int64_t count = std::min<int64_t>(LANES, num_keys - start);
        Lanes many[LANES] = {};
        for (int64_t key = 0; key < count; ++key) {
            const A* row = keys + offsets[start + key];
            Lanes total = {};
#pragma GCC unroll 8
            for (int64_t part = 0; part < num_parts; ++part)
                total += load_some(row + part * LANES, which(part)) * wide[part];
            many[key] = total;
        }
        Lanes found = (Lanes)_mm512_permutexvar_ps(order, (__m512)sums_of(many)) * scaling;
        const __mmask16 is_key = (1 << count) - 1;
        found = (Lanes)_mm512_mask_blend_ps(is_key, (__m512)(Lanes{} - INFINITY), (__m512)found);
        scores[start / LANES] = found;
        largest = found > largest ? found : largest;
    }
    const Lanes top = Lanes{} + _mm512_reduce_max_ps((__m512)largest);
    Lanes weights = {};
    for (int64_t group = 0; group < num_groups; ++group) {
        scores[group] = exp_of(scores[group] - top);
        weights += scores[group];
    }
    const float* weight = reinterpret_cast<const float*>(scores);
    const float sum = sum_of(weights);
    constexpr int TOGETHER = 4;
    for (int64_t first = 0; first < num_parts; first += TOGETHER) {
        const int64_t count = std::min<int64_t>(TOGETHER, num_parts - first);
        Lanes total[TOGETHER] = {};
        if (count == TOGETHER) {
            const __mmask16 last = which(first + TOGETHER - 1);
            for (int64_t key = 0; key < num_keys; ++key) {
                const A* row = values + offsets[key] + first * LANES;
                const Lanes share = Lanes{} + weight[key];
#pragma GCC unroll 4
                for (int part = 0; part < TOGETHER; ++part)
                    total[part] += load_some(row + part * LANES, part + 1 < TOGETHER ? all : last) * share;
            }
        } else {
            for (int64_t key = 0; key < num_keys; ++key)
                for (int64_t part = 0; part < count; ++part)
                    total[part] += load_some(values + offsets[key] + (first + part) * LANES, which(first + part)) *
                                   (Lanes{} + weight[key]);
        }
        for (int64_t part = 0; part < count; ++part)
            for (int64_t index = 0; index < LANES && (first + part) * LANES + index < head_dim; ++index)
                output[(first + part) * LANES + index] = from_float<A>(total[part][index] / sum);
    }
}

// Keeps the new keys and values of rows, [T, K * Dh]. All threads take part.
template <typename A>
void keep_rows(const A* new_keys, const A* new_values, const Strides& strides, A* keys, A* values, const Places& places,
               const Heads& heads, int64_t num_rows) {
    const int64_t size = heads.num_kv_heads * heads.head_dim;
    const Share rows = share(num_rows);
    for (int64_t row = rows.first; row < rows.last; ++row) {
        const int64_t slot = places.slot(row, places.positions[row]);
        std::memcpy(keys + slot * size, new_keys + row * strides.keys, size * sizeof(A));
        std::memcpy(values + slot * size, new_values + row * strides.values, size * sizeof(A));
    }
#pragma omp barrier
}

// Keeps the new keys and values of rows; then each row's attention over its sequence as far as its position. All
// threads take part.
template <typename A>
void attend_rows(const A* queries, const A* new_keys, const A* new_values, const Strides& strides, A* keys, A* values,
                 const Places& places, const Heads& heads, int64_t window, float scaling, A* outputs,
                 int64_t num_rows) {
    const int64_t num_heads = heads.num_heads, head_dim = heads.head_dim;
    const int64_t stride = heads.num_kv_heads * head_dim, groups = num_heads / heads.num_kv_heads;
    keep_rows(new_keys, new_values, strides, keys, values, places, heads, num_rows);
    thread_local std::vector<int64_t> memory;
    int64_t* offsets = nullptr;  // of the keys that a row sees
    int64_t num_keys = 0;
    const Share own = share(num_rows * num_heads);
    for (int64_t place = own.first; place < own.last; ++place) {
        const int64_t row = place / num_heads, head = place % num_heads, offset = head / groups * head_dim;
        if (place == own.first || head == 0) {
            const int64_t last = places.positions[row] + 1;
            const int64_t first = window > 0 ? std::max<int64_t>(0, last - window) : 0;
            num_keys = last - first;
            offsets = room_in(memory, num_keys);
            for (int64_t key = first; key < last; ++key) offsets[key - first] = places.slot(row, key) * stride;
        }
        const int64_t parts = head_dim % LANES ? 0 : head_dim / LANES;
        const auto by_size = parts == 4 ? attend<A, 4> : parts == 8 ? attend<A, 8> : attend<A, 0>;
        by_size(queries + row * strides.queries + head * head_dim, keys + offset, values + offset, offsets, num_keys,
                head_dim, scaling, outputs + place * head_dim);
    }
}

}  // namespace
