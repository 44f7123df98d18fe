"""Every message that crosses the wire, one frozen struct per meaning. Wire version: see WIRE_VERSION.

Orders are imperatives and go from the coordinator to a worker; facts are past participles and come back.
A message is a msgpack array: its name, then its fields in the order below. A reply counts only if its epoch,
order number and, per sequence, generation and base length all match what was asked; otherwise it is dropped
and counted. Rollback is data: `base_len` and `since` of the next order say what a lane must keep.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WIRE_VERSION = 4

LaneName = Literal["target", "speculator"]
SharedTransport = Literal["memfd", "cuda_ipc"]
"""How tensors go from lane to lane without being copied; else they go inline, within messages."""
TensorDtype = Literal["bf16", "fp16", "fp32", "fp64", "int32", "int64", "uint8"]
LaneEngine = Literal["native", "hf", "toy", "ngram", "suffix", "eagle", "cascade", "remote"]
Acceptance = Literal["coupled", "rejection", "block"]
"""By which rule draft tokens stand; see workers.acceptance and workers.rejection."""
QForm = Literal["sparse", "full"]
"""Whether a draft token is drawn from the likeliest tokens only, or from all; its q row names as many."""
Phase = Literal[
    "boot",
    "load",
    "attention_setup",
    "profile",
    "capacity",
    "allocate",
    "warm_up",
    "capture",
    "lock",
    "serve",
]
"""The steps of a worker's start, in their order; see workers.lifecycle."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: `epoch` is the incarnation of the worker that sends or is meant to receive it."""

    epoch: str


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the parts that messages are made of; a record is never sent alone."""


# ---------------------------------------------------------------- records


LAST_NORM = 0
"""As a part of a hidden row: the last layer's, normed, as the output layer reads it."""


class HeadSpec(Record, frozen=True):
    """A drafting head that reads the target's hidden rows. `file`: its weights.

    `taps`: after how many layers of the target the parts of a row are taken; LAST_NORM is what the last norm
    makes of the last layer's. `row_bytes`: size of one row. `window`: how many of the latest positions' rows
    it needs.
    """

    file: str
    taps: tuple[int, ...]
    row_bytes: int
    window: int


class LaneSpec(Record, frozen=True):
    """What a worker must become. `model` is a checkpoint directory, or the parameters of a toy; of a drafting
    head it is the target's checkpoint, whose embedding and output rows the head uses; of a `remote`
    speculator the addresses of its servers, with commas: the first that serves takes the lane.

    Lengths in tokens: `max_model_len` of the longest sequence, `num_speculative_tokens` of the longest draft.
    `reuse_prefixes`: whether keys and values that were computed for one sequence serve others.
    `prior`: file of what the target is known to write, for lookups; empty if there is none.
    `ranks`: processes that the lane is made of, each with a part of the model; the first speaks for all.
    `first_gpu`: the GPU that device `auto` means, counted from 0; other ranks take those after it.
    `acceptance`, `q_rows`: by which rule drafts are judged; what a speculator draws from, and sends, for it.
    `q_arena`: bytes of an arena that it is to send rows by; 0: they go inline.
    """

    lane: LaneName
    engine: LaneEngine
    model: str
    dtype: Literal["fp32", "bf16", "fp16"]
    device: str
    threads: int
    max_sequences: int
    max_model_len: int
    num_speculative_tokens: int = 0
    reuse_prefixes: bool = True
    prior: str = ""
    head: HeadSpec | None = None
    ranks: int = 1
    first_gpu: int = 0
    acceptance: Acceptance = "coupled"
    q_rows: QForm = "sparse"
    q_arena: int = 0


class Offer(Record, frozen=True):
    """What a speculator server drafts with, which an executor does not know before it is attached.

    `name`: how people call it. `head`: what it wants to read of the target; its file is the server's own.
    """

    engine: LaneEngine
    name: str
    head: HeadSpec | None = None


class Vocabulary(Record, frozen=True):
    """Identity of a model's token ids: how many, padding rows included, and a digest of (id, token) pairs."""

    size: int
    fingerprint: str


class ConstraintSpec(Record, frozen=True):
    """What else decides which token a sequence gets, at every position and draft position alike.

    Penalties are 0, 0 and 1 where there are none. `logit_bias`: (token id, what is added to its logit).
    `allowed_token_ids`: none means all. `bad_words`: token runs that must not come about. `grammar`: in
    llguidance's form, empty for none; once the text is complete, one of `end_token_ids` follows.
    """

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: str
    end_token_ids: tuple[int, ...]


class MemoryProfile(Record, frozen=True):
    """What a lane needs of its device's memory, measured in its worst shapes. Sizes in bytes.

    device, device_id: what the lane runs on, as it names it and as all processes identify it.
    process: the process without its model: on a CPU interpreter and libraries, on a GPU nothing.
    weights, activations, workspace, graphs: the model, what a forward pass allocates beside the workspace,
        the workspace, the pools of captured graphs.
    load_peak: the most that it has taken so far, while it loaded.
    kv_bytes_per_token, kv_block, max_kv_tokens: a token's keys and values, how many tokens are handed out at
        once, and how many the lane could ever use.
    free, held: what the device has left now, and what this lane holds of it already.
    """

    device: str
    device_id: str
    process: int
    weights: int
    activations: int
    workspace: int
    graphs: int
    load_peak: int
    kv_bytes_per_token: int
    kv_block: int
    max_kv_tokens: int
    free: int
    held: int


class SamplingSpec(Record, frozen=True):
    """How one sequence is sampled; the same on both lanes, so that a draft can predict the target's sample.

    Tokens in `stop_token_ids` cannot be sampled before `min_tokens` tokens have been generated.
    `logprobs` is the number of alternatives to report per token, None for no log-probabilities at all;
    `prompt_logprobs` the same for the tokens of the prompt.
    Most sequences have no `constraints`.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    constraints: ConstraintSpec | None = None
    prompt_logprobs: int | None = None


class OpenedSequence(Record, frozen=True):
    """A sequence to hold: all committed tokens, of which the first `prompt_len` are the prompt."""

    seq: int
    gen: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingSpec


class ArenaExport(Record, frozen=True):
    """What a lane tells of an arena, once: all that another needs to open it, but for the file of a memfd.

    arena, epoch: its identity; handle bytes may repeat, these never do.
    nbytes, slots: its size, and how many tensors may stand in it at once.
    device_id: where its memory is, as all processes identify devices; `cpu` for memfd.
    handle: of CUDA memory, as the driver gave it; empty for memfd, whose file goes by the socket pair.
    pid, pid_namespace: of the exporter, since the driver tells processes apart by their numbers.
    """

    arena: str
    epoch: str
    transport: SharedTransport
    nbytes: int
    slots: int
    device_id: str
    handle: bytes
    pid: int
    pid_namespace: int


class SlotRef(Record, frozen=True):
    """One write to one slot of an arena; the slot's generation grows with each write."""

    arena: str
    slot: int
    generation: int


class Descriptor(Record, frozen=True):
    """A dense tensor in an arena: `nbytes` bytes from `offset` on, in slot `slot` since its `generation`.

    Checked by ipc.descriptor before anything is made of it.
    """

    arena: str
    epoch: str
    slot: int
    generation: int
    offset: int
    nbytes: int
    dtype: TensorDtype
    shape: tuple[int, ...]

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.arena, self.slot, self.generation)


class HiddenRows(Record, frozen=True):
    """The target's hidden rows of `count` tokens from position `start` on: bfloat16, row after row.

    They are in `data`, or where `at` says in an arena of the target. The coordinator hands them from lane to
    lane and never looks inside.
    """

    start: int
    count: int
    data: bytes = b""
    at: Descriptor | None = None


class QRow(Record, frozen=True):
    """What a draft token was drawn from, exactly: ids, uint32, and their weights, float32, which need not sum
    to 1. No ids: the weights are those of all tokens. Neither: the token was not drawn but looked up.

    All tokens' weights may also be where `at` says, in an arena of the speculator. Numbers are
    little-endian. See ipc.q_rows.
    """

    tokens: bytes
    weights: bytes
    at: Descriptor | None = None


class DraftItem(Record, frozen=True):
    """Guess up to `k` tokens after `base_len` committed ones; the last, `since`, are news to the lane.

    `rows`: hidden rows of committed tokens that are news, too, in the order of their positions.
    `hypotheses`: the draft `ahead` is being verified after these `base_len` tokens. Guess so many verdicts on
    it, and up to `k` tokens after each; with 0 of them nothing is ahead, and the guesses follow `base_len`.
    """

    seq: int
    gen: int
    base_len: int
    since: list[int]
    k: int
    rows: list[HiddenRows] = []
    ahead: list[int] = []
    hypotheses: int = 0


class Prepared(Record, frozen=True):
    """Guesses in case the verdict on what is ahead is that its first `n_accepted` tokens stand and
    `next_token` follows. `q`, `expected`: as in DraftedItem."""

    n_accepted: int
    next_token: int
    tokens: list[int]
    q: list[QRow] = []
    expected: float | None = None


class DraftedItem(Record, frozen=True):
    """The guesses, possibly none, for the tokens at positions base_len, base_len + 1, …

    `worth`: so many of them are worth verifying, by the speculator's own confidence; None is all.
    `broken`: there will never be any, since what the lane computes for this sequence are no numbers.
    `q`: what each of them was drawn from; empty if none was drawn, and always where acceptance is coupled.
    `prepared`: in answer to an item with something ahead, whose `tokens` are none: a draft for each verdict
    that was guessed, the likeliest first.
    `expected`: so many of the guesses should stand, from a speculator whose prepared drafts are worse than
    others; None from all others, and if they were drawn.
    """

    seq: int
    gen: int
    base_len: int
    tokens: list[int]
    broken: bool = False
    worth: int | None = None
    q: list[QRow] = []
    prepared: list[Prepared] = []
    expected: float | None = None


class VerifyItem(Record, frozen=True):
    """Sample after `base_len` committed tokens and after each token of `draft`.

    `rows_since`: first position whose hidden row is wanted, if it is run in this pass; None wants none.
    `prompt_since`: first position of the prompt whose log-probability is wanted; None wants none.
    `q`: as in DraftedItem, of these draft tokens.
    """

    seq: int
    gen: int
    base_len: int
    since: list[int]
    draft: list[int]
    rows_since: int | None = None
    prompt_since: int | None = None
    q: list[QRow] = []


class TokenLogprobs(Record, frozen=True):
    """Log-probability of a token under the model (before temperature) and the best alternatives.

    `rank`, only of a prompt's tokens: 1 for the most probable one.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class PendingItem(Record, frozen=True):
    """No verdict yet: of the sequence's history, the lane has run the first `held` tokens so far.

    `rows`, `prompt_logprobs`: as in VerifiedItem, up to there.
    """

    seq: int
    gen: int
    held: int
    rows: list[HiddenRows] = []
    prompt_logprobs: list[TokenLogprobs] = []


class VerifiedItem(Record, frozen=True):
    """Verdict: the first `n_accepted` draft tokens stand, then comes `next_token`.

    `logprobs` has one entry per new token (n_accepted + 1) if the sequence asked for them, else none.
    `rows`: those that were wanted of tokens that were run and stand, up to the last accepted one.
    `prompt_logprobs`: one for each position of the prompt from `prompt_since` on, as far as it has been run.
    """

    seq: int
    gen: int
    base_len: int
    n_accepted: int
    next_token: int
    logprobs: list[TokenLogprobs]
    rows: list[HiddenRows] = []
    prompt_logprobs: list[TokenLogprobs] = []


# ---------------------------------------------------------------- orders: coordinator → worker


class Attach(Message, frozen=True):
    """To a speculator server, before all else: be this executor's speculator, under this epoch.

    `client`: who asks, for the server's log; who may ask is a matter of keys.
    """

    wire_version: int
    client: str


class Configure(Message, frozen=True):
    """First order, in answer to Greeted: load this lane and serve."""

    spec: LaneSpec


class Profile(Message, frozen=True):
    """In answer to Loaded, when it is this lane's turn: measure what you need. Others on the device wait."""


class Allocate(Message, frozen=True):
    """In answer to Profiled: make room for the keys and values of so many tokens, then come to serve."""

    kv_tokens: int


class Export(Message, frozen=True):
    """Make an arena of this name, for `nbytes` bytes of tensors, so that the other lanes can read them."""

    arena: str
    transport: SharedTransport
    nbytes: int


class Import(Message, frozen=True):
    """Open another lane's arena and prove that its memory is what is read; a memfd's file was sent before."""

    export: ArenaExport


class Unmap(Message, frozen=True):
    """Let go of these arenas at once, your own and others'. No reply."""

    arenas: list[str]


class Open(Message, frozen=True):
    """Hold these sequences. No reply: a lane that cannot hold them fails at their first Draft or Verify."""

    sequences: list[OpenedSequence]


class Draft(Message, frozen=True):
    """To the speculator: propose tokens for these sequences. An item with k = 0 only brings it up to date.

    `budget`: guesses that the verification has room for, of all sequences together; None is any number.
    `released`: what of this lane's arenas nobody reads any more. `arena`: the lane's own that large q rows
    are to be put into; where it is empty or full, they go inline.
    """

    order: int
    items: list[DraftItem]
    budget: int | None = None
    released: list[SlotRef] = []
    arena: str = ""


class Cancel(Message, frozen=True):
    """To the speculator: answer the Draft `order` at once, with what there is. Without effect once it is
    answered. No reply of its own."""

    order: int


class Verify(Message, frozen=True):
    """To the target: judge these drafts; an empty draft makes a plain one-token step.

    For histories that it has not run yet, at most `prefill` tokens are to be run now, in the order of items.
    `taps`: after how many layers the hidden rows that items want are taken. `arena`: the lane's own that they
    are to be put into; where it is empty or full, they go inline. `released`: as in Draft.
    """

    order: int
    items: list[VerifyItem]
    taps: tuple[int, ...] = ()
    prefill: int = 1 << 24
    arena: str = ""
    released: list[SlotRef] = []


class Close(Message, frozen=True):
    """Forget these sequences and free what they hold. No reply."""

    seqs: list[int]


class Stop(Message, frozen=True):
    """Finish the order at hand, then exit with status 0."""


# ---------------------------------------------------------------- facts: worker → coordinator


class Greeted(Message, frozen=True):
    """First fact of an epoch."""

    wire_version: int
    lane: LaneName
    pid: int


class PhaseReached(Message, frozen=True):
    """A step of the worker's start is done: it took `seconds` and left `resident_bytes` of memory in use.

    `outcome` says what came of it where that may differ, such as `none` for a capture on a CPU.
    """

    phase: Phase
    seconds: float
    resident_bytes: int
    outcome: str


class Loaded(Message, frozen=True):
    """Weights are there and attention is set up, on this device (an identity); the lane waits to profile.

    `no_cuda_ipc`: why memory of that device cannot be shared with other lanes; empty if it can, so far.
    `peers`: devices of the lane's other ranks, in their order.
    `serves`: what a speculator server drafts with; None from a lane that was told what to become.
    """

    device_id: str
    no_cuda_ipc: str = ""
    peers: tuple[str, ...] = ()
    serves: Offer | None = None


class Exported(Message, frozen=True):
    """Answer to Export: the arena, or why there is none. A memfd's file was sent before."""

    arena: str
    export: ArenaExport | None
    reason: str = ""


class Imported(Message, frozen=True):
    """Answer to Import: what the exporter wrote is read, unless `reason` says why not."""

    arena: str
    reason: str = ""


class Profiled(Message, frozen=True):
    """Answer to Profile; `peers`: of the lane's other ranks, in their order."""

    profile: MemoryProfile
    peers: tuple[MemoryProfile, ...] = ()


class StepTime(Record, frozen=True):
    """How long a step of so many sequences with so many rows in all took, samples included."""

    sequences: int
    rows: int
    seconds: float


class Ready(Message, frozen=True):
    """The lane serves. In tokens: `max_model_len` of the longest sequence that it can hold, `pass_tokens` of
    the longest pass; 0 is any number. `step_times`: of steps that it took before, if it did any."""

    vocabulary: Vocabulary
    max_model_len: int
    notes: list[str]
    pass_tokens: int = 0
    step_times: list[StepTime] = []


class Drafted(Message, frozen=True):
    """Answer to Draft; `busy_ns` is the time that the lane computed.

    `reused`: tokens whose keys and values it found, computed for other sequences, since its start.
    `acks`: what it was handed in arenas and has read.
    """

    order: int
    items: list[DraftedItem]
    busy_ns: int
    reused: int = 0
    acks: list[SlotRef] = []


class Verified(Message, frozen=True):
    """Answer to Verify; `busy_ns` is the time that the lane computed.

    `pending`: items whose histories are longer than there was time for. `reused`, `acks`: as in Drafted.
    """

    order: int
    items: list[VerifiedItem]
    busy_ns: int
    pending: list[PendingItem] = []
    reused: int = 0
    acks: list[SlotRef] = []


class Progressed(Message, frozen=True):
    """Sent by the worker's own loop while it has no order, `idle_turns` counting up: it does not hang."""

    idle_turns: int


class Failed(Message, frozen=True):
    """The worker cannot go on and exits after this. `kind` is one of FAILURE_KINDS."""

    kind: str
    message: str


FAILURE_KINDS = ("configuration", "load", "protocol", "memory", "numerics", "internal")

Order = (
    Attach
    | Configure
    | Profile
    | Allocate
    | Export
    | Import
    | Unmap
    | Open
    | Draft
    | Cancel
    | Verify
    | Close
    | Stop
)
Fact = (
    Greeted
    | PhaseReached
    | Loaded
    | Exported
    | Imported
    | Profiled
    | Ready
    | Drafted
    | Verified
    | Progressed
    | Failed
)
