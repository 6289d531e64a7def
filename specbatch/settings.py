"""Every setting, read once. Flags win over `SPECBATCH_*` variables, which win over a `specbatch.toml` in the working directory."""

from __future__ import annotations

import tomllib
from base64 import b64decode
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from specbatch.domain import Mode
from specbatch.errors import UsageError

BUILTIN_MODEL = "builtin:smollm2-135m"
BUILTIN_FOLDER = "smollm2-135m-instruct"  # in the user's cache, once an engine has needed it
MOST_TOKENS = 16  # drafted in a step
DEFAULT_ALIAS = "default"  # every worker answers to it, so that an example file fits any model

_SCHEMES = {
    "redis_url": ("redis", "rediss", "redis+socket"),
    "database_url": ("postgresql", "postgres", "postgresql+psycopg", "sqlite"),
}


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SPECBATCH_", toml_file="specbatch.toml", extra="forbid", frozen=True)

    data_dir: Path = Field(Path(".specbatch"), description="Everything embedded lives under it: database, queue, files, caches.")
    database_url: str | None = Field(None, description="postgresql://... ; SQLite under data_dir when unset.")
    redis_url: str | None = Field(None, description="redis://... ; an embedded Valkey under data_dir when unset.")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    engine: Literal["vllm", "scripted"] = "vllm"
    model: str | None = Field(None, description=f"A Hugging Face id, a folder, or {BUILTIN_MODEL} (the default where no GPU is seen).")
    served_names: Annotated[tuple[str, ...], NoDecode] = Field((), description="Further names that requests may use for the model.")
    modes: Annotated[tuple[Mode, ...], NoDecode] = Field((), description="The modes that a worker offers; all that it can when unset.")
    dtype: str = Field("auto", description="float32 on CPUs without bfloat16 units.")
    max_model_len: int | None = Field(None, ge=1)
    max_num_seqs: int | None = Field(None, ge=1, description="Requests that decode in one step; vLLM chooses when unset.")
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    cpu_kv_cache_gib: float = Field(1.0, gt=0, description="KV cache on a machine without a GPU, in GiB.")
    enforce_eager: bool | None = Field(
        None, description="Skip compilation and graph capture: starts sooner, decodes slower. On a CPU by default."
    )
    trust_remote_code: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs", description="Log probabilities that a request gets: the model's, or after penalties, temperature and masks."
    )
    quantization: str | None = None
    tool_call_parser: str | None = Field(None, description="vLLM's parser of tool calls, for example hermes; tool_choice needs it.")
    reasoning_parser: str | None = Field(None, description="vLLM's parser of the model's reasoning, for example qwen3.")

    engine_args: str = Field("", description="Further words of vLLM's command line, as `vllm serve` takes them; they win.")

    draft: str | None = Field(None, description="The draft model of mode draft_model: an id or a folder.")
    draft_tokens: int = Field(4, ge=1, le=MOST_TOKENS, description="K: tokens that a draft or a head drafts a step.")
    draft_tensor_parallel_size: int | None = Field(None, ge=1, description="GPUs that the draft spreads over; the target's when unset.")
    draft_quantization: str | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    eagle: str | None = Field(None, description="The head of modes eagle and eagle3: an id or a folder.")
    ngram_tokens: int = Field(4, ge=1, le=MOST_TOKENS, description="K in mode ngram.")
    ngram_lookup_max: int = Field(3, ge=1)
    ngram_lookup_min: int = Field(2, ge=1)
    suffix_tokens: int = Field(16, ge=1, le=MOST_TOKENS, description="Most tokens drafted a step in mode suffix.")
    suffix_tree_depth: int = Field(24, ge=1, description="Longest match and draft together in mode suffix.")
    suffix_cached_requests: int = Field(10_000, ge=0, description="Answers that mode suffix remembers; 0 for none but the row's own.")
    suffix_factor: float = Field(1.0, ge=0, description="Tokens drafted for each token that matched in mode suffix.")
    suffix_min_probability: float = Field(0.1, ge=0, le=1, description="The least share of earlier texts that went on as a draft does.")
    tokens_by_batch_size: Annotated[tuple[tuple[int, int, int], ...], NoDecode] = Field(
        (), description="K by how many requests run in a step, as first-last:K,...; K may be 0."
    )

    scripted_delay_ms: float = Field(0.0, ge=0, description="A row's time in the scripted engine.")
    shard_rows: int = Field(256, ge=1, description="Rows that travel together.")
    shards_in_flight: int = Field(8, ge=1, description="Shards that a worker feeds to its engine at once.")
    lease_seconds: float = Field(10.0, gt=0, description="How long a silent worker keeps its shards.")
    max_attempts: int = Field(4, ge=2, description="Attempts at a shard before it is split, and at a row before it fails.")
    sweep_seconds: float = Field(2.0, gt=0, description="How often the reconciler looks for what was lost.")
    stop_seconds: float = Field(30.0, gt=0, description="How long a stopping worker lets requests in flight finish.")
    max_file_bytes: int = Field(4 * 1024**3, ge=1)
    max_batch_rows: int = Field(5_000_000, ge=1)
    max_line_bytes: int = Field(64 * 1024**2, ge=1)
    webhook_url: str | None = Field(None, description="Where the end of each batch is announced that names no webhook_url of its own.")
    webhook_secret: str | None = Field(
        None, repr=False, description="whsec_...: signs webhooks (standardwebhooks.com). None are sent without."
    )
    webhook_private_addresses: bool = Field(False, description="Whether webhooks may go to addresses of a private network.")

    @field_validator("modes", "served_names", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("webhook_secret")
    @classmethod
    def _check_secret(cls, value: str | None) -> str | None:
        try:
            usable = value is None or len(b64decode(value.removeprefix("whsec_"), validate=True)) >= 16
        except ValueError:
            usable = False
        if not usable:
            raise ValueError("write it as whsec_ and 24 or more random bytes in base64: openssl rand -base64 24")
        return value

    @field_validator("redis_url", "database_url")
    @classmethod
    def _check_scheme(cls, value: str | None, info: ValidationInfo) -> str | None:
        schemes = _SCHEMES[str(info.field_name)]
        if value is not None and value.partition("://")[0] not in schemes:
            raise ValueError(f"write it as {schemes[0]}://...")
        address = (value or "").partition("://")[2].partition("/")[0].rpartition("@")[2]
        port = address.rpartition("]")[2].rpartition(":")
        if port[1] and not port[2].isdigit():
            raise ValueError(f"the port {port[2]!r} is no number; in a password, write : / @ as %3A %2F %40")
        return value

    @field_validator("tokens_by_batch_size", mode="before")
    @classmethod
    def _read_schedule(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            steps = [part.replace("-", ":").split(":") for part in value.split(",") if part.strip()]
            return tuple((int(first), int(last), int(k)) for first, last, k in steps)
        except ValueError as wrong:
            raise ValueError("write it as first-last:K,..., for example 1-8:5,9-512:0") from wrong

    @field_validator("tokens_by_batch_size")
    @classmethod
    def _check_schedule(cls, steps: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        """As vLLM wants it: from a batch of one, upward, without overlaps."""
        end = 0
        for first, last, k in steps:
            if (end == 0 and first != 1) or first <= end or last < first:
                raise ValueError(f"{first}-{last} is out of order: begin at 1 and go upward without overlaps, for example 1-8:5,9-512:0")
            if not 0 <= k <= MOST_TOKENS:
                raise ValueError(f"K of {first}-{last} is {k}: use 0 to {MOST_TOKENS}")
            end = last
        return steps

    @model_validator(mode="after")
    def _check_lookup(self) -> Settings:
        if self.ngram_lookup_min > self.ngram_lookup_max:
            raise ValueError(
                f"ngram_lookup_min ({self.ngram_lookup_min}) is above ngram_lookup_max ({self.ngram_lookup_max}): lower the minimum"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @cached_property
    def home(self) -> Path:
        return self.data_dir.expanduser().resolve()

    @cached_property
    def files_dir(self) -> Path:
        return self.home / "files"

    @cached_property
    def cache_dir(self) -> Path:
        """Converted models: shared by every data directory of this user."""
        return Path(platformdirs.user_cache_dir("specbatch"))

    @cached_property
    def sql_url(self) -> str:
        """SQLAlchemy's URL. A bare postgresql:// means psycopg 3 in SQLAlchemy 2.1; postgres:// is what hosting panels print."""
        if self.database_url is None:
            return f"sqlite:///{self.home / 'specbatch.db'}"
        return self.database_url.replace("postgres://", "postgresql://", 1)

    def environment(self) -> dict[str, str]:
        """Every setting that was set, from wherever, as SPECBATCH_* variables: a child process that reads them has the same settings."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        given["data_dir"] = self.home
        return {f"SPECBATCH_{name.upper()}": _render(value) for name, value in given.items() if value is not None}


def _render(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part[0]}-{part[1]}:{part[2]}" if isinstance(part, tuple) else str(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def load(**flags: object) -> Settings:
    """Settings from flags (None means unset), environment and specbatch.toml. Raises UsageError naming each bad setting."""
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]
    except tomllib.TOMLDecodeError as wrong:
        raise UsageError(f"{Settings.model_config['toml_file']} is not TOML: {wrong}. Mend that line, or remove the file") from None
    except ValidationError as wrong:
        raise UsageError("; ".join(_say(dict(error)) for error in wrong.errors())) from None


def _say(error: dict[str, object]) -> str:
    place = error["loc"]
    name = str(place[0]) if isinstance(place, tuple) and place else ""
    if error["type"] == "extra_forbidden":
        near = get_close_matches(name, Settings.model_fields, n=1)
        return f"specbatch.toml names {name!r}, which is no setting: " + (f"did you mean {near[0]!r}?" if near else "the README lists all")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"setting {name} (SPECBATCH_{name.upper()}): {message}, got {error['input']!r}" if name else message
