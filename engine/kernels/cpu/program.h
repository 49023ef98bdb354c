// What a decoder is told: the program that a description of a model becomes, and the steps to run it on.
#pragma once

#include "attention.h"
#include "linear.h"
#include "routing.h"

namespace penstock {

// The rows that operations read and write. Once the sampled rows are gathered, `hidden` and `attended` are theirs.
enum class Stream : int32_t {
    hidden,
    qkv,
    attended,
    inner,
    added,
    prepared,  // what a head has joined, in the form that its linear reads; or what is read through a norm
    per_layer,
    gates,     // of a layer's part of `per_layer`
    latents,
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
    keep,     // writes the features that a head reads: what `linear` makes of all taps side by side; or, without one, the
              // norm of hidden
    join,     // a head's input: `hidden`, the rows of embeddings, becomes the residual; see Op
    experts,  // what experts make of a norm of `from`, or of `from` -> `to`, or added to it, times `scale`
    recur,    // qkv, and gates -> attended, by a state of the tokens before
    attend_latents,  // qkv, which is queries, and latents -> attended; latents go into the cache
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

enum class MixerKind : int32_t { delta, mamba, conv };

// A layer's mixer with a state, in the words of recurrent.py, which says what it computes. Vectors that it does not have
// are null.
//
// Of a gated delta net, a row is its channels [queries, keys, values], then what lets its output through; `gates` are
// betas, then steps. Of Mamba-2, it is what lets its output through, then its channels [inputs, keys, queries], then
// steps. Of a short convolution, it is B, C, x, and its channels are B * x.
struct Mixer {
    MixerKind kind;
    int32_t key_heads, heads, keys, values;  // heads, and the dimensions of the state of one
    int32_t is_tiled;                        // head h reads key head h mod key heads; otherwise, neighbours read the same
    int32_t kernel, channels;
    float eps, least_step, most_step;
    const float* conv;       // [kernel][channels]
    const float* conv_bias;  // [channels]
    const float *decay, *step_bias, *skip;  // [heads]
    const float* norm;       // [values]; of Mamba-2 [heads][values]
    // In slot 0, of the others at strides of Model::slot_floats; null if nothing is kept
    float* state;    // [heads][values / kColumns][keys][kColumns]
    float* history;  // [kernel - 1][channels]
    float* pending;  // [Model::num_pending][row_floats()]

    int width() const { return kind == MixerKind::conv ? channels : heads * values; }
    int gates() const { return kind == MixerKind::delta ? 2 * heads : kind == MixerKind::mamba ? heads : 0; }
    size_t row_floats() const { return channels + gates(); }
    int first_channel() const { return kind == MixerKind::mamba ? width() : 0; }

    int key_head(int head) const { return is_tiled ? head % key_heads : head / (heads / key_heads); }
};

// One step of the program that a description of a model becomes.
//
// A head (EAGLE-3, or a model's own layer of multi-token prediction) has one layer. The row of a token reads the norm of
// the token's embedding beside the norm of the features of the token before it. Of EAGLE-3, these are its residual. The
// first token of a sequence has none before it: nobody sees it.
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
    const Linear *const *of_queries, *const *of_latents;  // [heads]: K, plain numbers of a query -> latent; V, latent -> values
    const Mixer* mixer;  // of recur, and of the linear that reads what it makes
    int32_t gates;       // of attention, and of the linear that reads what it makes: so many come before the queries
    int32_t follows_norm;  // of join: a chain goes on from hidden as it left the last norm, and not as it came to it
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
    int32_t num_slots, num_pending;  // of states, and the rows that one of them has beside each; 0 if nothing is kept
    int64_t slot_floats;
    void* states;  // all of them
    const Op* ops;
    int32_t num_ops;
};

struct Step {
    const int32_t *token_ids, *positions, *query_starts, *context_lens;
    const int32_t* block_tables;  // [tables][sequences][max_blocks]
    const int32_t* sample_rows;
    int32_t tokens, sequences, max_blocks, samples;
    const int32_t* state_slots = nullptr;  // [sequences][4] source, target, replayed, certain; or null
    const int32_t* state_saves = nullptr;  // [saves][4] sequence, or -1 for none, rows, slot, kept
    int32_t saves = 0;
    const int32_t* rotary_positions = nullptr;  // in the text, where tokens of a sequence may have been dropped; or null

    const int32_t* rotated_by() const { return rotary_positions ? rotary_positions : positions; }

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
    kBadState,
    kBadSeat,
};

// Looks whether the states that a step reads and writes can be.
inline int check_states(const Model& model, const Step& s) {
    const auto is_slot = [&](int slot) { return slot >= 0 && slot < model.num_slots; };
    const auto is_kept = [&](int rows) { return rows >= 0 && rows <= model.num_pending; };
    const auto rows_of = [&](int i) { return s.query_starts[i + 1] - s.query_starts[i]; };
    for (int i = 0; i < s.sequences; i++) {
        const int32_t* own = s.state_slots + 4 * i;
        if (!is_slot(own[0]) || !is_slot(own[1])) return kBadSlot;
        if (!is_kept(own[2]) || own[3] < 0 || own[3] > rows_of(i)) return kBadState;
        if (own[1] != 0 && !is_kept(rows_of(i) - own[3])) return kBadState;
    }
    for (int i = 0; i < s.saves; i++) {
        const int32_t* save = s.state_saves + 4 * i;
        if (save[0] < 0) continue;
        if (!is_slot(save[2])) return kBadSlot;
        if (save[0] >= s.sequences || save[1] < 0 || !is_kept(save[3]) || save[1] > rows_of(save[0]) - save[3]) return kBadState;
    }
    return kOk;
}

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
            if (s.rotated_by()[t] < s.positions[t] || s.rotated_by()[t] >= model.max_position) return kBadPosition;
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
    return model.num_slots > 0 && s.state_slots ? check_states(model, s) : kOk;
}

constexpr int kRowsPerChunk = 8;  // of the cheap phases

// The same of the tokens whose keys and values are placed: the tokens of a block lie side by side in the same lines, so
// that a prompt's blocks go to one thread each.
inline int rows_to_place(int tokens) { return tokens < 8 * kBlockTokens ? kRowsPerChunk : kBlockTokens; }

// A row length of an odd number of cache lines, so that the rows of a tile do not fall into the same cache sets.
inline size_t padded(size_t n) { return ((n + 15) / 16 | 1) * 16; }

// The same of rows that a product may write as operands of tiles for another one.
inline size_t padded_inner(size_t n) {
    return kHasTiles ? row_stride(n * sizeof(BFloat)) / sizeof(BFloat) : padded(n);
}

}  // namespace penstock
