// Decoder layers of the Llama family over few rows, at the speed at which the memory hands out the weights.
//
// A row comes out to the same bits however many are computed with it: every sum runs over its values in one order. In
// bfloat16 values are rounded where the operations of torch round them, sums are in float32.
//
// T rows; I inputs and O outputs of a product; D hidden size; F size between gate and down; H query heads, K key heads,
// Dh head size; S tokens of a block; B sequences, n blocks of the longest. Weights are [O, I], rows of states [T, D].

#include "highest.hpp"
#include "layer.hpp"

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

template <typename A>
bool run_layers(const Layer* const* layers, int64_t num_layers, const Pages& pages, const Rotary& rotary, const Norm& norm,
                const Source& source, const StateRows& keep, A* states, int64_t num_rows, int64_t num_threads) {
    for (const StateRows& rows : {source.states, source.context, keep})
        if (!are_there(rows, num_rows)) return false;
    const LayerPass<A> pass(layers, num_layers, num_rows, source.fuse);
    const int64_t size = layers[0]->down.num_outputs;
#pragma omp parallel num_threads(num_threads)
    {
        pass.begin(source, size, states);
        for (int64_t index = 0; index < num_layers; ++index) pass.run(*layers[index], pages, index, rotary, states);
        pass.finish(norm, keep, size, states);
    }
    return true;
}

// Of each row of [T, O]; `names` are what places are called, or null, and so is what is not wanted of probabilities.
template <typename A>
void highest(const A* logits, const int64_t* names, int64_t* ids, float* values, float* probabilities,
             int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(std::min(num_threads, num_rows))
    for (int64_t row = 0; row < num_rows; ++row) {
        const A* own = logits + row * size;
        const Highest found = highest_of(own, size);
        ids[row] = names ? names[found.place] : found.place;
        values[row] = found.value;
        if (probabilities) probabilities[row] = probability_of(found.value, own, size);
    }
}

}  // namespace

#define FOR_TYPE(A, SUFFIX)                                                                                           \
    void highest_##SUFFIX(const A* logits, const int64_t* names, int64_t* ids, float* values, float* probabilities,   \
                          int64_t num_rows, int64_t size, int64_t num_threads) {                                      \
        highest<A>(logits, names, ids, values, probabilities, num_rows, size, num_threads);                           \
    }                                                                                                                 \
    void product_##SUFFIX(const Linear* linear, const A* states, A* outputs, int64_t num_rows, int64_t num_threads) { \
        product<A>(*linear, states, outputs, num_rows, num_threads);                                                  \
    }                                                                                                                 \
    void before_attention_##SUFFIX(const Layer* layer, const A* states, const Rotary* rotary, A* heads,               \
                                   int64_t num_rows, int64_t num_threads) {                                           \
        before_attention<A>(layer, states, *rotary, heads, num_rows, num_threads);                                    \
    }                                                                                                                 \
    void after_attention_##SUFFIX(const Layer* layer, const A* states, const A* attended, A* outputs,                 \
                                  int64_t num_rows, int64_t num_threads) {                                            \
        after_attention<A>(layer, states, attended, outputs, num_rows, num_threads);                                  \
    }                                                                                                                 \
    void paged_attention_##SUFFIX(const A* queries, const A* new_keys, const A* new_values, const Strides* strides,   \
                                  A* keys, A* values, const Places* places, const Heads* heads, int64_t window,       \
                                  float scaling, A* outputs, int64_t num_rows, int64_t num_threads) {                 \
        paged_attention<A>(queries, new_keys, new_values, *strides, keys, values, *places, *heads, window, scaling,   \
                           outputs, num_rows, num_threads);                                                           \
    }                                                                                                                 \
    int64_t run_layers_##SUFFIX(const Layer* const* layers, int64_t num_layers, const Pages* pages,                   \
                                const Rotary* rotary, const Norm* norm, const Source* source, const StateRows* keep,  \
                                A* states, int64_t num_rows, int64_t num_threads) {                                   \
        return run_layers<A>(layers, num_layers, *pages, *rotary, *norm, *source, *keep, states, num_rows,            \
                             num_threads);                                                                            \
    }

extern "C" {

// Whether products can go by tiles, from now on.
int64_t has_tiles() { return may_use_tiles(); }

FOR_TYPE(float, float32)
FOR_TYPE(Bfloat16, bfloat16)
}
