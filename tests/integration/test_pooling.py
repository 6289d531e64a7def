"""A pooling model in vLLM: vectors and scores in OpenAI's form, and a refusal of all that it cannot answer. One engine for the module."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse
from starlette.testclient import TestClient

from specbatch.context import Context
from specbatch.domain import Mode, Outcome, Row, RowResult
from specbatch.lines import compact
from specbatch.service import reports, shards
from specbatch.service.decider import NOTHING_GENERATED
from specbatch.serving import served_names
from specbatch.settings import Settings
from tests.engine_fixtures import START_SECONDS, RunningEngine
from tests.model_fixtures import CONTEXT, HIDDEN
from tests.server_fixtures import CHAT, Desk, file_lines, line
from worker.engine import build

EMBEDDINGS = "/v1/embeddings"
ANSWERED = ["/v1/embeddings", "/v1/rerank", "/v1/score"]
TEXTS = ["The weather was cold yesterday.", "A batch is a file of requests.", "def average(values):"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(START_SECONDS + 120),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def embedder(tiny_embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("pooling"), engine="vllm", model=str(tiny_embedder), dtype="float32", cpu_kv_cache_gib=0.25
    )
    running = RunningEngine(build(settings, Mode.PLAIN), "vllm")
    running.run(running.engine.start(), START_SECONDS)
    yield running
    running.run(running.engine.stop())
    running.close()


def vectors(embedder: RunningEngine, given: Any, **body: Any) -> list[list[float]]:
    """The vectors of an answer that the official client reads, whose usage is what was measured."""
    reply = embedder.answer(EMBEDDINGS, {"model": "default", "input": given, **body})
    assert reply.status_code == 200, reply.body
    answer = CreateEmbeddingResponse.model_validate(reply.body)
    assert (answer.object, [each.object for each in answer.data]) == ("list", ["embedding"] * len(answer.data))
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == reply.measurement.prompt_tokens > 0
    assert reply.measurement.generated_tokens == 0
    return [each.embedding for each in answer.data]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(map(float.__mul__, one, other)) / math.hypot(*one) / math.hypot(*other)


def test_it_answers_what_a_pooling_model_can(embedder: RunningEngine) -> None:
    assert sorted(embedder.engine.endpoints) == ANSWERED


def test_vectors_in_the_order_of_their_texts(embedder: RunningEngine) -> None:
    together = vectors(embedder, TEXTS)
    assert [len(vector) for vector in together] == [HIDDEN] * 3
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in together)
    alone = [vectors(embedder, text)[0] for text in TEXTS]
    assert all(cosine(one, other) > 0.9999 for one, other in zip(together, alone, strict=True))
    assert all(cosine(one, other) < 0.99 for one, other in pairwise(together)), "the texts are told apart"


def test_base64_holds_the_same_numbers(embedder: RunningEngine) -> None:
    reply = embedder.answer(EMBEDDINGS, {"model": "default", "input": TEXTS, "encoding_format": "base64"})
    assert reply.status_code == 200, reply.body
    found = [struct.unpack(f"<{HIDDEN}f", base64.b64decode(each["embedding"])) for each in reply.body["data"]]
    for packed, plain in zip(found, vectors(embedder, TEXTS, encoding_format="float"), strict=True):
        assert packed == pytest.approx(plain, abs=1e-5)
    assert reply.measurement.prompt_tokens == reply.body["usage"]["prompt_tokens"] > 0


def test_token_ids_are_texts_too(embedder: RunningEngine) -> None:
    reply = embedder.answer(EMBEDDINGS, {"model": "default", "input": [[40, 41, 42], [43]]})
    assert reply.status_code == 200, reply.body
    assert (len(reply.body["data"]), reply.measurement.prompt_tokens) == (2, 4)


def test_scores_rank_what_is_the_same_first(embedder: RunningEngine) -> None:
    """Cosines of the vectors above: one of a text with itself, and less of others."""
    first, *others = vectors(embedder, TEXTS)
    expected = [1.0, *(cosine(first, other) for other in others)]
    scored = embedder.answer("/v1/score", {"model": "default", "text_1": TEXTS[0], "text_2": TEXTS})
    assert scored.status_code == 200, scored.body
    assert [each["score"] for each in scored.body["data"]] == pytest.approx(expected, abs=1e-4)
    ranked = embedder.answer("/v1/rerank", {"model": "default", "query": TEXTS[0], "documents": [*TEXTS[1:], TEXTS[0]], "top_n": 2})
    assert ranked.status_code == 200, ranked.body
    assert [each["relevance_score"] for each in ranked.body["results"]] == pytest.approx([1.0, max(expected[1:])], abs=1e-4)
    assert ranked.body["results"][0]["document"]["text"] == TEXTS[0]
    for reply in (scored, ranked):
        assert reply.measurement.prompt_tokens == reply.body["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "empty"),
        ({"input": "word " * CONTEXT * 4}, f"maximum context length is {CONTEXT} tokens"),
        ({"input": "a", "dimensions": 8}, "Matryoshka"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
    ids=["empty", "too long", "dimensions", "encoding"],
)
def test_what_the_model_refuses(embedder: RunningEngine, body: dict[str, Any], words: str) -> None:
    reply = embedder.answer(EMBEDDINGS, {"model": "default", **body})
    assert reply.status_code == 400
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert words in str(reply.body["error"])
    assert len(vectors(embedder, "it goes on")) == 1


def test_a_chat_is_refused_naming_what_it_answers(embedder: RunningEngine) -> None:
    reply = embedder.answer(CHAT, {"model": "default", "messages": [{"role": "user", "content": "hi"}]})
    assert 400 <= reply.status_code < 500
    assert all(endpoint in reply.body["error"]["message"] for endpoint in ANSWERED)


def test_batches_end_to_end(embedder: RunningEngine, ctx: Context, desk: Desk, api: TestClient, upload: Any, create: Any) -> None:
    """A chat's batch fails in validation; a batch of texts goes to the engine, undrafted whatever the worker offers."""
    model = embedder.engine.model
    names = served_names(Settings(data_dir=ctx.settings.data_dir, model=model))
    answered = embedder.engine.endpoints
    shards.alive(ctx, "w", model=model, names=names, modes=[Mode.PLAIN, Mode.NGRAM], withheld={}, mode=Mode.PLAIN, endpoints=answered)
    chat = create(upload(line("a"), line("b")))["id"]
    texts = [{"custom_id": text, "method": "POST", "url": EMBEDDINGS, "body": {"model": "default", "input": text}} for text in TEXTS]
    embeddings = create(upload(*texts), endpoint=EMBEDDINGS)["id"]
    desk.validate()
    refused = api.get(f"/v1/batches/{chat}").json()
    assert refused["status"] == "failed"
    assert [(error["line"], error["code"], error["param"]) for error in refused["errors"]["data"]] == [
        (1, "unsupported_endpoint", "url"),
        (2, "unsupported_endpoint", "url"),
    ]
    why = f"The model 'default' cannot answer {CHAT}. It answers: {', '.join(ANSWERED)}."
    assert refused["errors"]["data"][0]["message"] == why
    assert {(group.mode, group.reason) for group in reports.decisions(ctx, embeddings)} == {(Mode.PLAIN, NOTHING_GENERATED)}

    def answer(row: Row) -> RowResult:
        reply = embedder.answer(EMBEDDINGS, row.body)
        return RowResult(row.row_index, Outcome.SUCCEEDED, reply.status_code, compact(reply.body), measurement=reply.measurement)

    desk.work(embeddings, answer)
    desk.finalize()
    done = api.get(f"/v1/batches/{embeddings}").json()
    assert (done["status"], done["request_counts"]) == ("completed", {"total": 3, "completed": 3, "failed": 0})
    lines = file_lines(api, done["output_file_id"])
    assert [each["custom_id"] for each in lines] == TEXTS
    answers = [CreateEmbeddingResponse.model_validate(each["response"]["body"]) for each in lines]
    assert all(len(each.data[0].embedding) == HIDDEN for each in answers)
    assert done["usage"]["total_tokens"] == sum(each.usage.total_tokens for each in answers) > 0
