// What a decoder is told: the program that a description of a model becomes, and the steps to run it on.
#pragma once

#include "attention.h"
#include "product.h"
#include "routing.h"

namespace penstock {

// The rows that operations read and write. Once the sampled rows are gathered, `hidden` and `attended` are theirs.
enum class Stream : int32_t {
    hidden,
    qkv,
    attended,
    inner,
    added,
    prepared,  // what a head has joined, in the form that its linear reads
    per_layer,
    gates,     // of a layer's part of `per_layer`
};

enum class OpKind : int32_t {
    embed,    // token ids -> hidden, times `scale`
    linear,   // a norm of `from`, or `from` itself -> `to`, or to be added to it
    norm,     // a norm of `from`, times `scale` -> added to `to`, which is multiplied by `after`
    attend,   // qkv -> attended; keys and values go into the cache
    gather,   // from here on, only the sampled rows are wanted
    finish,   // the norm of hidden -> what the caller gets
    combine,  // the token's own embeddings for all layers, times `scale` -> with the norms of `per_layer`, both / sqrt(2)
    tap,      // hidden is the next of the hidden states that a head reads
    keep,     // writes the features that a head reads: what `linear` makes of all taps side by side
    join,     // a head's input: `hidden`, the rows of embeddings, becomes the residual; see Op
    experts,  // what experts make of a norm of `from`, or of `from` -> `to`, or added to it, times `scale`
};

// A router and the experts that it chooses from, of which there are those from `first` on, and shared ones.
struct Experts {
    Router router;
    int32_t first, own;
    int32_t weighs_inputs;
    int32_t each_reads_its_own;  // of a row: experts have permutations, or weights multiply what they read
    Bend bend;
    Gate shared_activation;
    const Linear* logits;
    const Linear *const *gate_up, *const *down;  // [own], of one kind each
    const Linear *shared_gate_up, *shared_down;  // or null
    const Linear* shared_gate;                   // to one number; or null
    const float *router_norm, *norm, *out_norm, *shared_norm, *shared_out_norm;  // [hidden], or null
};

// One step of the program that a description of a model becomes.
//
// A head (EAGLE-3) has one layer. The row of a token reads the norm of the token's embedding beside the norm of the
// features of the token before it, and these are its residual. The first token of a sequence has none before it: nobody
// sees it.
struct Op {
    OpKind kind;
    Kind time;
    Stream from, to;
    const Linear* linear;
    const float* norm;  // weights, or null
    int32_t is_centered;
    int32_t adds;       // of a tap, which of them it is; of join, whether the norm of the features is the residual
    float scale, after;
    Gate gate;
    int32_t part;       // of a linear: it reads that part of `per_layer`, times the activation of `from`; or -1. Of
                        // combine: the width of a part
    const Shape* shape;
    int32_t window;
    int32_t first;       // no token sees those before it but itself
    int32_t is_sampled;  // of attention, before they are gathered: no row is wanted but the sampled ones
    int32_t table;       // of its sequences' block tables, that of its cache
    void* rows;          // of combine: [vocab][width of all parts], which is that of its linear; or a Linear. Of keep
                         // and join, the features: bfloat16 [blocks][kBlockTokens][width], in blocks of the KV cache
    int32_t rows_type;
    const float* rows_norm;  // of the features
    char* keys;          // of this layer, in the first block
    char* values;
    int64_t stride;      // bytes from block to block
    const Experts* experts;
};

struct Model {
    int32_t hidden, qkv, attended, inner, vocab, max_position;  // largest widths, the vocabulary's size, positions
    float eps;
    int32_t embedding_type;
    const void* embedding;           // [vocab][hidden] in its own type, or null:
    const Linear* embedding_linear;  // its rows are the embedding
    int32_t kv_type;
    int32_t num_blocks, num_tables;
    void* kv;  // all layers: see kv_layout.h
    int64_t kv_bytes;
    const Op* ops;
    int32_t num_ops;
};

struct Step {
    const int32_t *token_ids, *positions, *query_starts, *context_lens;
    const int32_t* block_tables;  // [tables][sequences][max_blocks]
    const int32_t* sample_rows;
    int32_t tokens, sequences, max_blocks, samples;

    const int32_t* tables(int number) const {
        return block_tables + static_cast<size_t>(number) * sequences * max_blocks;
    }
};

enum Status : int {
    kOk = 0,
    kBadToken,
    kBadPosition,
    kBadBlock,
    kBadStarts,
    kBadSample,
    kNoMemory,
    kBadSlot,
};

// Looks whether a step can be, and finds the sequence of each token.
inline int check(const Model& model, const Step& s, std::vector<int>& sequence_of) {
    sequence_of.resize(s.tokens);
    if (s.query_starts[0] != 0 || s.query_starts[s.sequences] != s.tokens) return kBadStarts;
    for (int i = 0; i < s.sequences; i++) {
        const int from = s.query_starts[i], to = s.query_starts[i + 1], context = s.context_lens[i];
        if (from < 0 || to < from || to > s.tokens) return kBadStarts;
        if (context < 0 || context > model.max_position || context > s.max_blocks * kBlockTokens) return kBadPosition;
        for (int t = from; t < to; t++) {
            if (s.token_ids[t] < 0 || s.token_ids[t] >= model.vocab) return kBadToken;
            if (s.positions[t] < 0 || s.positions[t] >= context) return kBadPosition;
            sequence_of[t] = i;
        }
        for (int number = 0; number < model.num_tables; number++) {
            const int32_t* table = s.tables(number) + static_cast<size_t>(i) * s.max_blocks;
            for (int b = 0; b < divide_up(context, kBlockTokens); b++)
                if (table[b] < 0 || table[b] >= model.num_blocks) return kBadBlock;
        }
    }
    for (int r = 0; r < s.samples; r++)
        if (s.sample_rows[r] < 0 || s.sample_rows[r] >= s.tokens) return kBadSample;
    return kOk;
}

constexpr int kRowsPerChunk = 8;  // of the cheap phases

// The same of the tokens whose keys and values are placed: the tokens of a block lie side by side in the same lines, so
// that a prompt's blocks go to one thread each.
inline int rows_to_place(int tokens) { return tokens < 8 * kBlockTokens ? kRowsPerChunk : kBlockTokens; }

// A row length of an odd number of cache lines, so that the rows of a tile do not fall into the same cache sets.
inline size_t padded(size_t n) { return ((n + 15) / 16 | 1) * 16; }

}  // namespace penstock
