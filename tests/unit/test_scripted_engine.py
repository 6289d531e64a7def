"""The scripted engine's own promises: the same text in every process, JSON that fits its schema, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specbatch.domain import Mode
from specbatch.errors import EngineStartError, UsageError
from specbatch.settings import Settings
from worker.engine import build
from worker.engine.base import EngineDied
from worker.engine.faults import FAULTS_VARIABLE
from worker.engine.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"


def body(text: str = "Say hello.", **fields: object) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], **fields}


def settings(tmp_path: Path, **fields: object) -> Settings:
    return Settings(data_dir=tmp_path, engine="scripted", **fields)  # type: ignore[arg-type]


async def started(tmp_path: Path, mode: Mode = Mode.PLAIN, **fields: object) -> ScriptedEngine:
    engine = build(settings(tmp_path, **fields), mode)
    assert isinstance(engine, ScriptedEngine)
    await engine.start()
    return engine


async def text_of(engine: ScriptedEngine, request: dict[str, Any]) -> str:
    reply = await engine.answer("one", CHAT, request)
    assert reply.status_code == 200, reply.body
    return str(reply.body["choices"][0]["message"]["content"])


async def test_text_depends_on_the_content_and_the_seed_alone(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    first = await text_of(engine, body(seed=1))
    assert first == await text_of(engine, body(seed=1))
    assert first != await text_of(engine, body(seed=2))
    assert first != await text_of(engine, body("Say goodbye.", seed=1))


async def test_text_is_the_same_in_another_process(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from specbatch.domain import Mode\n"
        "from specbatch.settings import Settings\n"
        "from worker.engine import build\n"
        "async def main():\n"
        "    engine = build(Settings(engine='scripted'), Mode.PLAIN)\n"
        "    await engine.start()\n"
        "    messages = [{'role': 'user', 'content': 'Say hello.'}]\n"
        "    reply = await engine.answer('x', '/v1/chat/completions', {'model': 'default', 'messages': messages})\n"
        "    print(reply.body['choices'][0]['message']['content'])\n"
        "asyncio.run(main())\n"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert other.stdout.strip() == await text_of(await started(tmp_path), body())


async def test_json_fits_the_schema(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 18, "maximum": 20},
            "colour": {"enum": ["red", "green"]},
            "pets": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/pet"}},
            "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "required": ["name", "age", "colour", "pets", "note"],
        "$defs": {"pet": {"type": "object", "properties": {"alive": {"type": "boolean"}}, "required": ["alive"]}},
    }
    engine = await started(tmp_path)
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(20):
        jsonschema.validate(json.loads(await text_of(engine, body(response_format=wanted, seed=seed))), schema)


async def test_every_speculative_mode_accepts_no_more_than_it_drafts(tmp_path: Path) -> None:
    for mode in Mode:
        for k in (1, 4):
            engine = await started(tmp_path, mode, ngram_tokens=k, draft_tokens=k, suffix_tokens=k)
            measured = (await engine.answer("one", CHAT, body())).measurement
            assert measured.generated_tokens > 0
            assert measured.accepted_tokens <= measured.drafted_tokens
            assert (measured.drafted_tokens > 0) == (mode is not Mode.PLAIN)
            assert engine.status().drafted_tokens == measured.drafted_tokens


async def test_a_poison_row_kills_the_engine_and_every_row_in_flight(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    bystander = asyncio.create_task(engine.answer("bystander", CHAT, body(metadata={"x-fault": "hang"})))
    while engine.status().running_requests == 0:
        await asyncio.sleep(0)
    with pytest.raises(EngineDied):
        await engine.answer("poison", CHAT, body(metadata={"x-fault": "die"}))
    with pytest.raises(EngineDied):
        await bystander
    assert engine.dead
    with pytest.raises(EngineDied):
        await engine.answer("late", CHAT, body())
    await engine.start()
    assert not engine.dead
    assert (await engine.answer("after", CHAT, body())).status_code == 200


async def test_a_fault_once_is_remembered_by_the_next_engine(tmp_path: Path) -> None:
    request = body(metadata={"x-fault": "die_once"})
    with pytest.raises(EngineDied):
        await (await started(tmp_path)).answer("one", CHAT, request)
    assert (await (await started(tmp_path)).answer("one", CHAT, request)).status_code == 200


async def test_refusals_and_server_errors_are_replies(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    for fault, status, kind in (("refuse", 400, "invalid_request_error"), ("error", 500, "server_error")):
        reply = await engine.answer("one", CHAT, body(metadata={"x-fault": fault}))
        assert (reply.status_code, reply.body["error"]["type"]) == (status, kind)


async def test_the_engine_s_own_faults_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "error:3, die:5")
    engine = await started(tmp_path)
    statuses = [(await engine.answer(str(number), CHAT, body())).status_code for number in range(4)]
    assert statuses == [200, 200, 500, 200]
    with pytest.raises(EngineDied):
        await engine.answer("fifth", CHAT, body())
    monkeypatch.setenv(FAULTS_VARIABLE, "start")
    with pytest.raises(EngineStartError, match=FAULTS_VARIABLE):
        await started(tmp_path)
    monkeypatch.setenv(FAULTS_VARIABLE, "dye:5")
    with pytest.raises(UsageError, match="dye:5"):
        await started(tmp_path)


async def test_no_more_rows_run_at_once_than_max_num_seqs(tmp_path: Path) -> None:
    engine = await started(tmp_path, max_num_seqs=2)
    hanging = [asyncio.create_task(engine.answer(str(number), CHAT, body(metadata={"x-fault": "hang"}))) for number in range(2)]
    while engine.status().running_requests < 2:
        await asyncio.sleep(0)
    third = asyncio.create_task(engine.answer("third", CHAT, body()))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not third.done()
    hanging[0].cancel()
    assert (await third).status_code == 200
    await engine.stop()
    with pytest.raises(EngineDied):
        await hanging[1]
