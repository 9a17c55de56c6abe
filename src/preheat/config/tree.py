"""Every setting, written once, with its default, its limits and its sentence."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Choice(Section, frozen=True):
    """A policy by name, with the options of its class's constructor."""

    name: Annotated[str, Meta(description="The policy's name.")]
    options: Annotated[dict[str, Any], Meta(description="Its options.")] = {}


class Listen(Section, frozen=True):
    """Where the gateway listens, and what one client may take."""

    address: Annotated[str, Meta(description="Host and port; port 0 takes a free one.")] = (
        "127.0.0.1:8000"
    )
    tls_cert: Annotated[
        str, Meta(description="PEM file with the certificate chain; empty: plain HTTP.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with its private key.")] = ""
    body_bytes: Annotated[int, Meta(gt=0, description="Largest request body.")] = 33_554_432
    bodies_bytes: Annotated[
        int, Meta(gt=0, description="Most bytes of large bodies held at once, over all clients.")
    ] = 1_073_741_824
    head_bytes: Annotated[int, Meta(gt=0, description="Largest request head.")] = 65_536
    head_lines: Annotated[int, Meta(gt=0, description="Most header lines in a request.")] = 100
    connections: Annotated[
        int, Meta(gt=0, description="Most client connections at once, each worker's.")
    ] = 4_096
    idle_s: Annotated[
        float, Meta(gt=0, description="An idle connection is closed after this long.")
    ] = 75.0
    head_s: Annotated[
        float, Meta(gt=0, description="A request's head must be complete within this.")
    ] = 10.0
    body_s: Annotated[
        float, Meta(gt=0, description="A request's body must be complete within this.")
    ] = 120.0
    write_s: Annotated[
        float, Meta(gt=0, description="A client that takes nothing for this long is dropped.")
    ] = 60.0
    drain_s: Annotated[
        float, Meta(ge=0, description="On SIGTERM, requests under way get this long to end.")
    ] = 30.0
    workers: Annotated[
        int,
        Meta(ge=1, le=256, description="Processes that answer; each has an L1, all share L2."),
    ] = 1


class Exact(Section, frozen=True):
    """The exact cache: equal requests get the stored answer."""

    ttl_s: Annotated[float, Meta(gt=0, description="How long an answer is served.")] = 3600.0
    max_ttl_s: Annotated[
        float, Meta(gt=0, description="The longest life that X-Preheat-Ttl can ask for.")
    ] = 86_400.0
    stale_s: Annotated[
        float,
        Meta(ge=0, description="Expired answers are kept this long for requests with max-stale."),
    ] = 0.0
    stale_while_revalidate_s: Annotated[
        float,
        Meta(
            ge=0,
            description="An answer expired for less than this is still served, while a new one is asked for.",
        ),
    ] = 0.0
    stale_if_error_s: Annotated[
        float,
        Meta(
            ge=0,
            description="An answer expired for less than this is served where the engine gives none.",
        ),
    ] = 0.0
    early_refresh: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="XFetch's beta: a popular answer is asked for anew shortly before it expires, the sooner the longer it takes; 1 is the usual value, 0 turns it off.",
        ),
    ] = 0.0
    negative_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How long an engine's 400, 404 or 422 is served to equal requests; 0: never.",
        ),
    ] = 0.0
    sampled: Annotated[
        str,
        Meta(
            description='Requests whose temperature isn\'t 0: "bypass" the cache, "reuse" one answer, or draw from "variants(k)".'
        ),
    ] = "bypass"
    secret_env: Annotated[
        str,
        Meta(
            description="Environment variable with the secret (32 characters or more) from which tenants' salts are derived; empty: one made at the first start and kept beside L2, readable by its owner only."
        ),
    ] = ""


class L1(Section, frozen=True):
    """The part of the cache in each worker's memory."""

    bytes: Annotated[int, Meta(ge=0, description="Its budget, overheads included.")] = 268_435_456
    entries: Annotated[int, Meta(ge=0, description="Most answers in it.")] = 100_000
    entry_bytes: Annotated[int, Meta(gt=0, description="Largest answer kept.")] = 1_048_576
    eviction: Annotated[Choice, Meta(description="Who leaves when it is full.")] = Choice(
        name="sieve"
    )
    admission: Annotated[Choice, Meta(description="Who may come in when it is full.")] = Choice(
        name="always"
    )


class L2(Section, frozen=True):
    """The part of the cache that workers share and that outlives them."""

    kind: Annotated[
        Literal["lmdb", "redis", "off"],
        Meta(
            description='"lmdb": files on a local disk; "redis": a Redis or Valkey server, which several gateways can share; "off": none.'
        ),
    ] = "lmdb"
    bytes: Annotated[
        int,
        Meta(ge=1_048_576, description="Budget of the files; a Redis has its own (maxmemory)."),
    ] = 1_073_741_824
    path: Annotated[
        str,
        Meta(description="Folder of the files, on a local disk; empty: $XDG_CACHE_HOME/preheat."),
    ] = ""
    url: Annotated[
        str, Meta(description="Address of the Redis, e.g. redis://cache-1:6379/0; no password.")
    ] = ""
    password_env: Annotated[
        str, Meta(description="Environment variable with its password; empty: none.")
    ] = ""
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest wait for one call of it, after which a request goes on without it; one may make two or three (look up, lease, look again).",
        ),
    ] = 0.005
    breaker_failures: Annotated[
        int, Meta(gt=0, description="After this many failures in a row it isn't asked for a while.")
    ] = 5
    breaker_open_s: Annotated[float, Meta(gt=0, description="That while.")] = 5.0
    queue_bytes: Annotated[
        int,
        Meta(
            gt=0,
            description="Most bytes waiting to be written, each worker's; past that nothing is kept.",
        ),
    ] = 67_108_864


class TrunkSettings(Section, frozen=True):
    """The text that warming needs: beginnings that at least three sessions of a tenant had. See warm.md."""

    keep: Annotated[
        Literal["memory", "file", "off"],
        Meta(
            description='"memory": each worker keeps what it sees itself; "file": also in a file beside L2, so that it outlives a restart; "off": nothing is kept, and nobody is warmed by the gateway.'
        ),
    ] = "memory"
    bytes: Annotated[int, Meta(gt=0, description="Most of it, each worker's.")] = 16_777_216
    age_s: Annotated[
        float, Meta(gt=0, description="What nobody began with for so long is forgotten.")
    ] = 604_800.0
    key_env: Annotated[
        str,
        Meta(
            description="Environment variable with the secret (32 characters or more) that the file is encrypted under; needs pip install 'preheat[encrypt]'. Empty: it isn't encrypted, and only its owner may read it."
        ),
    ] = ""


class RequestLog(Section, frozen=True):
    """The log that the laboratory reads: one row a request, never its text."""

    enabled: Annotated[
        bool, Meta(description="Write it; needs the extra: pip install 'preheat[log]'.")
    ] = False
    path: Annotated[str, Meta(description="Its folder; empty: $XDG_STATE_HOME/preheat/log.")] = ""
    bytes: Annotated[
        int, Meta(ge=1_048_576, description="The oldest files go when it is larger than this.")
    ] = 10_737_418_240
    days: Annotated[float, Meta(gt=0, description="Files older than this go.")] = 30.0
    roll_s: Annotated[
        float, Meta(gt=0, description="A Parquet file is made of what came in so many seconds.")
    ] = 3600.0


class EngineSettings(Section, frozen=True):
    """One group of equal upstreams, mostly of one. Times in seconds."""

    kind: Annotated[
        Literal["openai", "embedded", "fake"],
        Meta(
            description='"openai": a compatible server at `url`; "embedded": llama.cpp in a child process; "fake": a deterministic one without a model, for tries and tests.'
        ),
    ] = "openai"
    url: Annotated[
        str, Meta(description="Address of an openai engine; without a path, /v1 is meant.")
    ] = ""
    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses of several equal servers, instead of `url`: requests are spread over those that are well."
        ),
    ] = ()
    routing: Annotated[
        Choice,
        Meta(
            description='Which of `urls` gets a request: "preheat" weighs each one\'s queue, the part of the prompt that it holds, and what computing the rest does to others; "least_loaded", "round_robin" and more stand beside it.'
        ),
    ] = Choice(name="preheat")
    shadow: Annotated[
        Choice,
        Meta(
            description='A second rule that is asked the same and not followed: /preheat/v1/workers and metrics say how often it would have chosen otherwise, and what that would have cost; "off": none.'
        ),
    ] = Choice(name="off")
    dialect: Annotated[
        Literal["auto", "openai", "anthropic", "vllm", "sglang", "tgi", "llamacpp"],
        Meta(description='What kind of server the `urls` are; "auto": each is asked.'),
    ] = "auto"
    kv_events: Annotated[
        tuple[str, ...],
        Meta(
            description="Where several `urls` publish their KV events (vLLM, SGLang): the `endpoint` of each one's --kv-events-config, in order, or one for all, in which {host} and {port} are the url's; needs pip install 'preheat[kv]'. Empty: what they hold is estimated."
        ),
    ] = ()
    kv_replay: Annotated[
        tuple[str, ...],
        Meta(
            description="Their `replay_endpoint`, likewise: what was lost, or cached before we came, is asked for there."
        ),
    ] = ()
    lmcache: Annotated[
        str,
        Meta(
            description="Where LMCache's coordinator (or older controller) answers that stands behind several `urls` of vLLM: requests that wait go where their prefix can be loaded. See tiers.md."
        ),
    ] = ""
    lmcache_instances: Annotated[
        tuple[str, ...],
        Meta(
            description="What it calls the instances behind the `urls`: one each, in order, or one for all. Empty: told by their addresses."
        ),
    ] = ()
    roles: Annotated[
        tuple[Literal["any", "prefill", "decode"], ...],
        Meta(
            description='What each of `urls` is for, in order, where vLLM runs with a KV connector: a prompt is computed by a "prefill" server, and answered by a "decode" one that fetches its KV; "any" answers whole requests where the others can\'t. Empty: all are "any". See engines.md.'
        ),
    ] = ()
    poll_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How often each of several `urls` is asked how busy it is (llama.cpp: 5 or more, as it answers between two batches); 0: never, nor what it is.",
        ),
    ] = 5.0
    slot_folders: Annotated[
        tuple[str, ...],
        Meta(
            description="What llama.cpp servers at `urls` were given as --slot-save-path, as this machine sees it: one folder for all or one each. What is pushed out of a slot is saved there, and loaded when its session comes back."
        ),
    ] = ()
    slot_bytes: Annotated[int, Meta(gt=0, description="Most bytes in each of them.")] = (
        8_589_934_592
    )
    slot_age_s: Annotated[
        float, Meta(gt=0, description="A file that wasn't used for so long is deleted.")
    ] = 86_400.0
    gate_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="One of several `urls` that is new, was started again or comes back is given what is hot (`trunks`) before it gets requests, for so long at most; others serve meanwhile. 0: it isn't.",
        ),
    ] = 20.0
    salts: Annotated[
        Literal["tenant", "off"],
        Meta(
            description='"tenant": servers whose cache takes a salt (vLLM) get one for each tenant, so that nobody can tell by the time what others have asked; a client\'s own counts beside it. Without tenants there is none. "off": what clients send.'
        ),
    ] = "tenant"
    adapters: Annotated[
        dict[str, str],
        Meta(
            description="LoRA adapters that its servers may be asked to load, by the name that clients use as a model's: where each lies, as the servers see it (vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, SGLang). A table, [engines.NAME.adapters]. See engines.md."
        ),
    ] = {}
    identity: Annotated[
        str,
        Meta(
            description="What names this group in the key of answers; empty: its name and first address, or with l2.kind redis its name alone. Set it to go on with stored answers behind another address."
        ),
    ] = ""
    http2: Annotated[
        bool, Meta(description="Speak HTTP/2 to https urls; needs pip install 'preheat[http2]'.")
    ] = False
    retries: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="How many others of `urls` are tried before the first byte, on connect errors and 429, and for inference on 502 to 504 and, once, where the connection broke.",
        ),
    ] = 2
    retry_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="How many of the refused requests (429, 502 to 504, a connection that broke) are asked elsewhere, as a share of the requests of late, plus five a second and a reserve of 100, in each worker process; connect errors aren't counted. 0: none is.",
        ),
    ] = 0.2
    health_path: Annotated[
        str,
        Meta(
            description="Where one of several `urls` that failed is asked whether it is well again; empty: the next request finds out."
        ),
    ] = "/health"
    health_s: Annotated[float, Meta(gt=0, description="How often it is asked that.")] = 2.0
    api_key_env: Annotated[
        str, Meta(description="Environment variable with the key sent to it.")
    ] = ""
    connect_s: Annotated[float, Meta(gt=0, description="Time to connect.")] = 5.0
    first_byte_s: Annotated[
        float, Meta(gt=0, description="Time to the first byte of the answer.")
    ] = 300.0
    idle_s: Annotated[float, Meta(gt=0, description="Longest silence within an answer.")] = 60.0
    queue_s: Annotated[float, Meta(gt=0, description="Longest wait for a free connection.")] = 30.0
    max_connections: Annotated[
        int,
        Meta(
            gt=0,
            description="Most connections to each url, each worker's; with http2, requests at once.",
        ),
    ] = 256
    breaker_failures: Annotated[
        int, Meta(gt=0, description="After this many failures in a row it isn't asked for a while.")
    ] = 5
    breaker_open_s: Annotated[float, Meta(gt=0, description="That while.")] = 10.0
    inject_usage: Annotated[
        bool,
        Meta(
            description="Ask streams for their usage where the client doesn't; off for servers that refuse stream_options."
        ),
    ] = True
    auto_breakpoints: Annotated[
        bool,
        Meta(
            description="Mark where cached prefixes should end (`cache_control`) in /v1/messages requests that have no marks of their own; a provider bills 1.25 times for what it writes and 0.1 for what it reads."
        ),
    ] = False
    forward_headers: Annotated[
        tuple[str, ...],
        Meta(description="More request headers to send it; they become part of the key."),
    ] = ()
    model: Annotated[
        str, Meta(description="GGUF file of an embedded engine; empty: the installed weights.")
    ] = ""
    threads: Annotated[
        int,
        Meta(
            ge=1,
            description="Threads of an embedded engine; more than 1 only where cores aren't shared.",
        ),
    ] = 1
    ctx_tokens: Annotated[int, Meta(ge=256, description="Its context, over all slots.")] = 8_192
    slots: Annotated[int, Meta(ge=1, description="Requests it computes at once.")] = 2
    batch_tokens: Annotated[
        int,
        Meta(
            ge=1, description="Its batch; small ones keep one long prompt from blocking everybody."
        ),
    ] = 128
    cache_ram_mib: Annotated[int, Meta(ge=0, description="Its prompt cache in host memory.")] = 256


class ModelSettings(Section, frozen=True):
    """A model by the name that clients use. Prices per million tokens, in any one currency."""

    engine: Annotated[str, Meta(description="The engine that serves it; empty: the first.")] = ""
    alias: Annotated[str, Meta(description="Its name at the engine; empty: the same.")] = ""
    version: Annotated[
        str,
        Meta(
            description="Anything that changes when weights, template or adapter do; part of the key."
        ),
    ] = ""
    input: Annotated[float, Meta(ge=0, le=1e9, description="Price of input tokens.")] = 0.0
    cached_input: Annotated[
        float | None,
        Meta(
            description="Price of input tokens that the provider's own cache had; absent: as input."
        ),
    ] = None
    output: Annotated[float, Meta(ge=0, le=1e9, description="Price of output tokens.")] = 0.0


class TenantSettings(Section, frozen=True):
    """A tenant: whose answers are separate from everybody else's."""

    api_key_env: Annotated[str, Meta(description="Environment variable with its key.")] = ""
    api_key_file: Annotated[str, Meta(description="File with its keys, one a line.")] = ""


class NamespaceSettings(Section, frozen=True):
    """What is different in one namespace (the X-Preheat-Namespace header)."""

    ttl_s: Annotated[float | None, Meta(description="As exact.ttl_s.")] = None
    stale_while_revalidate_s: Annotated[
        float | None, Meta(description="As exact.stale_while_revalidate_s.")
    ] = None
    stale_if_error_s: Annotated[float | None, Meta(description="As exact.stale_if_error_s.")] = None
    negative_ttl_s: Annotated[float | None, Meta(description="As exact.negative_ttl_s.")] = None
    sampled: Annotated[str | None, Meta(description="As exact.sampled.")] = None


class Admin(Section, frozen=True):
    """The admin routes."""

    api_key_env: Annotated[
        str,
        Meta(description="Environment variable with their key; empty: they answer loopback only."),
    ] = ""
    listen: Annotated[
        str, Meta(description="Host and port of their own; empty: the gateway's.")
    ] = ""


class Telemetry(Section, frozen=True):
    """What is told about requests."""

    open_metrics: Annotated[
        bool,
        Meta(description="Let anybody read /metrics; else it is guarded like the admin routes."),
    ] = False
    log_requests: Annotated[
        Literal["none", "misses", "all"],
        Meta(
            description='Which requests get a log line: "none"; "misses", those that got no stored answer; "all". Never their text.'
        ),
    ] = "misses"


class Settings(Section, frozen=True):
    """The whole tree."""

    listen: Listen = Listen()
    exact: Exact = Exact()
    l1: L1 = L1()
    l2: L2 = L2()
    fallback_message: Annotated[
        str,
        Meta(
            description="Written `engines.fallback_message`: what to answer, with status 200, when an engine gives no answer; empty: an error."
        ),
    ] = ""
    engines: dict[str, EngineSettings] = {}
    models: dict[str, ModelSettings] = {}
    tenants: dict[str, TenantSettings] = {}
    namespaces: dict[str, NamespaceSettings] = {}
    admin: Admin = Admin()
    trunks: TrunkSettings = TrunkSettings()
    log: RequestLog = RequestLog()
    telemetry: Telemetry = Telemetry()


NAMED: Final[Mapping[str, type[Section]]] = {
    "engines": EngineSettings,
    "models": ModelSettings,
    "tenants": TenantSettings,
    "namespaces": NamespaceSettings,
}
"""Sections with one table for each name."""


def fields_of(section: type[Section]) -> Iterator[tuple[str, str, Any]]:
    """(name, sentence, default) of each setting of a section."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        described = [arg for arg in get_args(hint)[1:] if isinstance(arg, Meta)]
        sentence = described[0].description if get_origin(hint) is Annotated and described else None
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield field.name, sentence or "", default
