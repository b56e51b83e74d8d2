// Decoder layers of the Llama family over few rows, at the speed at which the memory hands out the weights.
//
// A row comes out to the same bits however many are computed with it: every sum runs over its values in one order. In
// bfloat16 values are rounded where the operations of torch round them, sums are in float32.
//
// T rows; I inputs and O outputs of a product; D hidden size; F size between gate and down; H query heads, K key heads,
// Dh head size; S tokens of a block; B sequences, n blocks of the longest. Weights are [O, I], rows of states [T, D].

#include "steps.hpp"

namespace {

template <typename A>
void before_attention(const Layer* layer, const A* states, const Rotary& rotary, A* heads, int64_t num_rows,
                      int64_t num_threads) {
    const LayerPass<A> pass(&layer, 1, num_rows);
#pragma omp parallel num_threads(num_threads)
    pass.before_attention(*layer, states, rotary, heads);
}

template <typename A>
void after_attention(const Layer* layer, const A* states, const A* attended, A* outputs, int64_t num_rows,
                     int64_t num_threads) {
    const LayerPass<A> pass(&layer, 1, num_rows);
#pragma omp parallel num_threads(num_threads)
    pass.after_attention(*layer, states, attended, outputs);
}

template <typename A>
void paged_attention(const A* queries, const A* new_keys, const A* new_values, const Strides& strides, A* keys,
                     A* values, const Places& places, const Heads& heads, int64_t window, float scaling, A* outputs,
                     int64_t num_rows, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    attend_rows<A>(queries, new_keys, new_values, strides, keys, values, places, heads, window, scaling, outputs,
                   num_rows);
}

}  // namespace

#define FOR_TYPE(A, SUFFIX)                                                                                          \
    int64_t run_##SUFFIX(Step* steps, int64_t num_steps, int64_t num_threads) {                                      \
        return run_steps<A>(steps, num_steps, num_threads);                                                          \
    }                                                                                                                \
    void before_attention_##SUFFIX(const Layer* layer, const A* states, const Rotary* rotary, A* heads,              \
                                   int64_t num_rows, int64_t num_threads) {                                          \
        before_attention<A>(layer, states, *rotary, heads, num_rows, num_threads);                                   \
    }                                                                                                                \
    void after_attention_##SUFFIX(const Layer* layer, const A* states, const A* attended, A* outputs,                \
                                  int64_t num_rows, int64_t num_threads) {                                           \
        after_attention<A>(layer, states, attended, outputs, num_rows, num_threads);                                 \
    }                                                                                                                \
    void paged_attention_##SUFFIX(const A* queries, const A* new_keys, const A* new_values, const Strides* strides,  \
                                  A* keys, A* values, const Places* places, const Heads* heads, int64_t window,      \
                                  float scaling, A* outputs, int64_t num_rows, int64_t num_threads) {                \
        paged_attention<A>(queries, new_keys, new_values, *strides, keys, values, *places, *heads, window, scaling,  \
                           outputs, num_rows, num_threads);                                                          \
    }

extern "C" {

// Whether products can go by tiles, from now on.
int64_t has_tiles() { return may_use_tiles(); }

FOR_TYPE(float, float32)
FOR_TYPE(Bfloat16, bfloat16)
}
