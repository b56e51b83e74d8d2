// What is done one after the other in a call: each step may read what those before it have left.

#pragma once

#include "highest.hpp"
#include "layer.hpp"

extern "C" {

// Layers one after the other, and a norm behind them; `states` [T, D] are what they give. Or of one layer the keys and
// values alone; then they are what it was given.
struct LayersStep {
    const Layer* const* layers;
    int64_t num_layers;
    Pages pages;
    Rotary rotary;
    Norm norm;
    Source source;
    StateRows keep;  // where they are put as well
    void* states;
    int64_t num_rows, size;  // T, D
    int64_t keeps_only;      // or 0
};

// A product, [T, O].
struct ProductStep {
    const Linear* linear;
    StateRows source;
    void* outputs;
    int64_t num_rows;
};

// The highest value of each row of logits, [T, O]; what is null is not wanted, but for `names`: then places have none.
struct HighestStep {
    const void* logits;
    const int64_t* names;
    int64_t *ids, *latest;  // [T] each, the same
    float *values, *probabilities;
    int64_t num_rows, size;
};

struct Step {
    int64_t kind;
    const void* what;
};

}  // extern "C"

namespace {

template <typename A> bool run_step(const LayersStep& step, int64_t num_threads) {
    for (const StateRows& rows : {step.source.states, step.source.context, step.keep})
        if (!are_there(rows, step.num_rows)) return false;
    const LayerPass<A> pass(step.layers, step.num_layers, step.num_rows, step.source.fuse);
    const int64_t size = step.size;
    A* states = static_cast<A*>(step.states);
#pragma omp parallel num_threads(num_threads)
    {
        pass.begin(step.source, size, states);
        for (int64_t index = 0; index < step.num_layers; ++index)
            pass.run(*step.layers[index], step.pages, index, step.rotary, step.keeps_only, states);
        pass.finish(step.norm, step.keep, size, states);
    }
    return true;
}

template <typename A> bool run_step(const ProductStep& step, int64_t num_threads) {
    if (!are_there(step.source, step.num_rows)) return false;
    const Plain<A> source{static_cast<const A*>(step.source.table), step.linear->num_inputs, step.source.places};
    product<A>(*step.linear, source, static_cast<A*>(step.outputs), step.num_rows, num_threads);
    return true;
}

template <typename A> bool run_step(const HighestStep& step, int64_t num_threads) {
#pragma omp parallel for num_threads(std::min(num_threads, step.num_rows))
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const A* logits = static_cast<const A*>(step.logits) + row * step.size;
        const Highest found = highest_of(logits, step.size);
        step.ids[row] = step.names ? step.names[found.place] : found.place;
        if (step.latest) step.latest[row] = step.ids[row];
        step.values[row] = found.value;
        if (step.probabilities) step.probabilities[row] = probability_of(found.value, logits, step.size);
    }
    return true;
}

// Whether all is done; else some row lies outside of its table.
template <typename A> bool run_steps(const Step* steps, int64_t num_steps, int64_t num_threads) {
    for (const Step* step = steps; step < steps + num_steps; ++step) {
        const auto run = [&](auto what) { return run_step<A>(*what, num_threads); };
        const bool is_done = step->kind == 0   ? run(static_cast<const LayersStep*>(step->what))
                             : step->kind == 1 ? run(static_cast<const ProductStep*>(step->what))
                                               : run(static_cast<const HighestStep*>(step->what));
        if (!is_done) return false;
    }
    return true;
}

}  // namespace
