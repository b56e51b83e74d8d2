// What is done one after the other in a call: each step may read what those before it have left.

#pragma once

#include <chrono>

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
    const int64_t* num_rows;  // T
    int64_t size;             // D
    int64_t keeps_only;       // or 0
};

// A product, [T, O].
struct ProductStep {
    const Linear* linear;
    StateRows source;
    void* outputs;
    const int64_t* num_rows;
};

// The highest value of each row of logits, [T, O]; what is null is not wanted, but for `names`: then places have none.
struct HighestStep {
    const void* logits;
    const int64_t* names;
    int64_t* ids;
    float *values, *probabilities;
    const int64_t* num_rows;
    int64_t size;
};

// The tokens of greedy drafts, the first ones done before: pass after pass the layers run over those drawn last, of as
// many sequences as it has rows, and the first ones draw another. Of a lone sequence it may end sooner.
struct DraftStep {
    const HighestStep* first;
    const LayersStep *layers, *head;
    const ProductStep* logits;
    const HighestStep* highest;
    const int64_t* counts;  // K, and rows by pass; behind the last nothing is drawn
    int64_t* token_ids;    // the sum of `counts`, by pass: where layers read what was drawn
    float* probabilities;  // as many: of these tokens; or null
    const double* least;   // K - 1: how likely all tokens of the passes so far must stand for another; or null
    int64_t* num_drawn;    // of the longest
};

struct Step {
    int64_t kind;
    const void* what;
    double seconds;  // that it took
};

}  // extern "C"

namespace {

// Layers over some of the rows that they are told: as many, from the first one on. Other rows than the first ones must
// stand in tables.
template <typename A>
bool run_layers(const LayersStep& step, int64_t first, int64_t num_rows, int64_t num_threads) {
    Source source = step.source;
    StateRows keep = step.keep;
    Pages pages = step.pages;
    Rotary rotary = step.rotary;
    if (first > 0) {
        for (StateRows* rows : {&source.states, &source.context, &keep})
            if (rows->table) rows->places += first;
        pages.places.sequences += first;
        pages.places.positions += first;
        pages.new_blocks = nullptr;  // they are cleared, and have been written to
        rotary.places += first;
    }
    for (const StateRows& rows : {source.states, source.context, keep})
        if (!are_there(rows, num_rows)) return false;
    const LayerPass<A> pass(step.layers, step.num_layers, num_rows, source.fuse);
    const int64_t size = step.size;
    A* states = static_cast<A*>(step.states);
#pragma omp parallel num_threads(num_threads)
    {
        pass.begin(source, size, states);
        for (int64_t index = 0; index < step.num_layers; ++index)
            pass.run(*step.layers[index], pages, index, rotary, step.keeps_only, states);
        pass.finish(step.norm, keep, size, states);
    }
    return true;
}

template <typename A> bool multiply_rows(const ProductStep& step, int64_t num_rows, int64_t num_threads) {
    if (!are_there(step.source, num_rows)) return false;
    const Plain<A> source{static_cast<const A*>(step.source.table), step.linear->num_inputs, step.source.places};
    product<A>(*step.linear, source, static_cast<A*>(step.outputs), num_rows, num_threads);
    return true;
}

template <typename A> void find_highest(const HighestStep& step, int64_t num_rows, int64_t num_threads) {
#pragma omp parallel for num_threads(std::min(num_threads, num_rows))
    for (int64_t row = 0; row < num_rows; ++row) {
        const A* logits = static_cast<const A*>(step.logits) + row * step.size;
        const Highest found = highest_of(logits, step.size);
        step.ids[row] = step.names ? step.names[found.place] : found.place;
        step.values[row] = found.value;
        if (step.probabilities) step.probabilities[row] = probability_of(found.value, logits, step.size);
    }
}

template <typename A> bool draw_tokens(const DraftStep& step, int64_t num_threads) {
    const HighestStep* latest = step.first;
    int64_t first = 0;
    double reach = 1.0;
    for (int64_t place = 0;; ++place) {
        const int64_t num_rows = step.counts[1 + place];
        std::copy_n(latest->ids, num_rows, step.token_ids + first);
        if (step.probabilities) std::copy_n(latest->probabilities, num_rows, step.probabilities + first);
        if (!run_layers<A>(*step.layers, first, num_rows, num_threads)) return false;
        *step.num_drawn = place + 1;
        if (place + 1 == step.counts[0]) return true;
        if (step.least && (reach *= latest->probabilities[0]) < step.least[place]) return true;
        const int64_t num_drawing = step.counts[1 + place + 1];
        if (!run_layers<A>(*step.head, first, num_drawing, num_threads)) return false;
        if (!multiply_rows<A>(*step.logits, num_drawing, num_threads)) return false;
        find_highest<A>(*step.highest, num_drawing, num_threads);
        latest = step.highest;
        first += num_rows;
    }
}

// Whether all is done; else some row lies outside of its table. Behind drafts that ended sooner there are fewer rows.
template <typename A> bool run_steps(Step* steps, int64_t num_steps, int64_t num_threads) {
    using Clock = std::chrono::steady_clock;
    int64_t num_fewer = 0;
    Clock::time_point start = Clock::now();
    for (Step* step = steps; step < steps + num_steps; ++step) {
        bool is_done = true;
        if (step->kind == 0) {
            const auto& layers = *static_cast<const LayersStep*>(step->what);
            is_done = run_layers<A>(layers, 0, *layers.num_rows - num_fewer, num_threads);
        } else if (step->kind == 1) {
            const auto& product = *static_cast<const ProductStep*>(step->what);
            is_done = multiply_rows<A>(product, *product.num_rows - num_fewer, num_threads);
        } else if (step->kind == 2) {
            const auto& highest = *static_cast<const HighestStep*>(step->what);
            find_highest<A>(highest, *highest.num_rows - num_fewer, num_threads);
        } else {
            const auto& draft = *static_cast<const DraftStep*>(step->what);
            is_done = draw_tokens<A>(draft, num_threads);
            num_fewer = is_done ? draft.counts[0] - *draft.num_drawn : 0;
        }
        if (!is_done) return false;
        const Clock::time_point end = Clock::now();
        step->seconds = std::chrono::duration<double>(end - start).count();
        start = end;
    }
    return true;
}

}  // namespace
