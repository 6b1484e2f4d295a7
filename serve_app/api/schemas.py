"""JSON schemas of what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from serve_app.api.adapters import ListedAdapter
from serve_app.api.forms.schema import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NOTHING,
    NUMBER,
    OBJECT,
    POSITIVE,
    STRING,
    Schema,
    array,
    either,
    mapping,
    nullable,
    record,
    reference,
)
from serve_app.api.listings import SPECIAL_TOKENS, ExplainedPart, LimitState, ModelEntry, Moment
from serve_app.api.logprobs import LegacyLogprobs
from serve_app.core.batches import ENDPOINTS, BatchState
from serve_app.core.delta import FinishReason
from serve_app.core.ledger import DIMENSIONS, SUMS
from serve_app.core.shares import Priority
from serve_app.core.tenants import BUDGETS, LEAST_BUDGET, LEAST_WEIGHT, MOST_BUDGET, MOST_WEIGHT, Meter, Scope

LEFT_OUT = ("title", "description", "default")


class _Response(GenerateJsonSchema):
    """A response has every member of its type, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True


def derived(kind: type) -> Schema:
    """Return the JSON schema of a response's type, as its annotations have it."""
    schema = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_Response)
    inlined: Schema = _inlined(schema, schema.pop("$defs", {}))
    return inlined


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return the schema with definitions in their places, without titles and texts that come from Python."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    kept = {name: each for name, each in schema.items() if name not in LEFT_OUT or isinstance(each, dict)}
    return {name: _inlined(each, definitions) for name, each in kept.items()}


RANKED = record({"logprob": NUMBER, "rank": nullable(COUNT), "decoded_token": STRING})
CALL = record({"id": STRING, "type": {"const": "function"}, "function": record({"name": STRING, "arguments": STRING})})
BESIDES: dict[str, Schema] = {
    "token_ids": array(COUNT),
    "prompt_token_ids": array(COUNT),
    "hidden_states": either(array(array(NUMBER)), array(NUMBER)),
    "sglext": record({"routed_experts": STRING, "routed_experts_shape": array(COUNT)}),
}
"""Of a choice, where they were asked for."""
CHOICE = record(
    {
        "index": COUNT,
        "text": STRING,
        "logprobs": nullable(derived(LegacyLogprobs)),
        "finish_reason": nullable({"enum": [reason.value for reason in FinishReason]}),
        "matched_stop": nullable(STRING, INTEGER),
    },
    optional={
        "model": STRING,
        **BESIDES,
        "prompt_logprobs": array(nullable(mapping(RANKED))),
        "stop_reason": nullable(STRING, INTEGER),
        "tool_calls": array(CALL),
    },
)
SCORED: dict[str, Schema] = {"token": STRING, "logprob": NUMBER, "bytes": array(COUNT)}
CHAT_ENDS: dict[str, Schema] = {
    "index": COUNT,
    "logprobs": nullable(
        record({"content": array(record({**SCORED, "top_logprobs": array(record(SCORED))})), "refusal": NOTHING})
    ),
    "finish_reason": CHOICE["properties"]["finish_reason"],
    "matched_stop": CHOICE["properties"]["matched_stop"],
}
CALL_DELTA = record(
    {"index": COUNT, "function": record({"arguments": STRING}, optional={"name": STRING})},
    optional={"id": STRING, "type": {"const": "function"}},
)
OF_CHATS: dict[str, Schema] = {**BESIDES, "model": STRING, "stop_reason": nullable(STRING, INTEGER)}
MESSAGE = record(
    {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": NOTHING},
    optional={"reasoning_content": STRING, "tool_calls": array(CALL)},
)
MESSAGE_DELTA = record(
    {},
    optional={
        "role": {"const": "assistant"},
        "content": STRING,
        "reasoning_content": STRING,
        "tool_calls": array(CALL_DELTA),
    },
)
USAGE = record(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    optional={
        "prompt_tokens_details": record({"cached_tokens": COUNT}, optional={"truncated_tokens": COUNT}),
        "completion_tokens_details": record({"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}),
    },
)
HEAD: dict[str, Schema] = {"id": STRING, "object": {"const": "text_completion"}, "created": COUNT, "model": STRING}
EXTRAS: dict[str, Schema] = {
    "timings": mapping(NUMBER),
    "sglext": record({}, optional={"cached_tokens_details": mapping(COUNT), "routed_experts": STRING}),
}
CAPSULE = record(
    {
        "object": {"const": "capsule"},
        "id": STRING,
        "created": COUNT,
        "service_version": STRING,
        "path": STRING,
        "dialect": STRING,
        "request": OBJECT,
        "parts": array(
            record(
                {
                    "part": COUNT,
                    "model": STRING,
                    "engine": nullable(STRING),
                    "numerics": STRING,
                    "prompt_tokens": nullable(COUNT),
                    "sampling": OBJECT,
                    "stop": OBJECT,
                    "choices": array(
                        record(
                            {
                                "token_ids": array(COUNT),
                                "text": STRING,
                                "finish_reason": nullable(STRING),
                                "matched_stop": nullable(either(STRING, COUNT)),
                            }
                        )
                    ),
                }
            )
        ),
    }
)
EXPLANATION = record(
    {
        "object": {"const": "explanation"},
        "dialect": STRING,
        "stream": BOOLEAN,
        "choices": COUNT,
        "ignored_parameters": array(STRING),
        "parameters": mapping(record({"value": {}, "from": {"enum": ["body", "model", "dialect", "default"]}})),
        "parts": array(derived(ExplainedPart)),
        "cost_at_most": NUMBER,
        "limits": mapping(derived(LimitState)),
    }
)
"""Of a request that did not run."""
NATIVE = record(
    {},
    optional={
        "index": COUNT,
        "content": STRING,
        "tokens": array(COUNT),
        "id_slot": INTEGER,
        "stop": BOOLEAN,
        "model": STRING,
        "tokens_predicted": COUNT,
        "tokens_evaluated": COUNT,
        "generation_settings": OBJECT,
        "prompt": {},
        "has_new_line": BOOLEAN,
        "truncated": BOOLEAN,
        "stop_type": {"enum": ["none", "eos", "limit", "word"]},
        "stopping_word": STRING,
        "tokens_cached": COUNT,
        "timings": EXTRAS["timings"],
        "completion_probabilities": array(OBJECT),
    },
)
"""Every member may be missing: `response_fields` chooses."""
ERROR_MEMBERS: dict[str, Schema] = {
    "message": STRING,
    "type": STRING,
    "param": nullable(STRING),
    "code": either(INTEGER, STRING),
    "error_code": STRING,
}
ERROR: Schema = {
    "description": "In mistral.rs a message alone, in sglang flat; in openai `code` is a word, in vllm `type` a class.",
    "anyOf": [
        record({"error": record(ERROR_MEMBERS)}),
        record({"object": {"const": "error"}, **ERROR_MEMBERS}),
        record({"message": STRING}),
    ],
}
USAGE_OF_INPUTS = record(
    {"prompt_tokens": COUNT, "total_tokens": COUNT},
    optional={"prompt_tokens_details": record({"truncated_tokens": COUNT})},
)


def _of_inputs(members: Mapping[str, Schema]) -> Schema:
    """Return the schema of an answer with one such object for each input."""
    data = array(record({"index": COUNT, **members}))
    own = {"object": {"const": "list"}, "data": data, "usage": USAGE_OF_INPUTS}
    return record({"id": STRING, "created": COUNT, "model": STRING, **own})


TOKEN = {"anyOf": [COUNT, record({"id": COUNT, "piece": either(STRING, array(COUNT))})]}

SCHEMAS: Mapping[str, Schema] = {
    "Completion": record({**HEAD, "choices": array(reference("Choice")), "usage": reference("Usage")}, optional=EXTRAS),
    "CompletionChunk": record(
        {**HEAD, "choices": array(reference("Choice"))}, optional={"usage": reference("Usage"), **EXTRAS}
    ),
    "Choice": CHOICE,
    "Usage": USAGE,
    "Embeddings": record(
        {
            "object": {"const": "list"},
            "data": array(
                record({"object": {"const": "embedding"}, "index": COUNT, "embedding": either(array(NUMBER), STRING)})
            ),
            "model": STRING,
            "usage": USAGE_OF_INPUTS,
        }
    ),
    "Ranking": record(
        {
            "id": STRING,
            "model": STRING,
            "results": array(
                record({"index": COUNT, "relevance_score": NUMBER}, optional={"document": record({"text": STRING})})
            ),
            "usage": USAGE_OF_INPUTS,
        }
    ),
    "Scores": _of_inputs({"object": {"const": "score"}, "score": NUMBER}),
    "Classes": _of_inputs({"label": STRING, "probs": array(NUMBER), "num_classes": POSITIVE}),
    "ChatCompletion": record(
        {
            **HEAD,
            "object": {"const": "chat.completion"},
            "choices": array(record({**CHAT_ENDS, "message": MESSAGE}, optional=OF_CHATS)),
            "usage": reference("Usage"),
        },
        optional=EXTRAS,
    ),
    "ChatChunk": record(
        {
            **HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": array(record({**CHAT_ENDS, "delta": MESSAGE_DELTA}, optional=OF_CHATS)),
        },
        optional={"usage": reference("Usage"), **EXTRAS},
    ),
    "Response": record(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": COUNT,
            "model": STRING,
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "error": nullable(record({"code": STRING, "message": STRING})),
            "incomplete_details": nullable(record({"reason": STRING})),
            "output": array(record({"id": STRING, "type": {"enum": ["reasoning", "message", "function_call"]}})),
            "usage": nullable(
                record(
                    {
                        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT),
                        "input_tokens_details": record({"cached_tokens": COUNT}),
                        "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    }
                )
            ),
        }
    ),
    "ResponseEvent": record({"type": STRING, "sequence_number": COUNT}),
    "NativeCompletion": either(reference("NativeResult"), array(reference("NativeResult"))),
    "NativeResult": NATIVE,
    "Error": ERROR,
    "AdapterList": record({"object": {"const": "list"}, "revision": COUNT, "data": array(reference("ListedAdapter"))}),
    "ListedAdapter": derived(ListedAdapter),
    "WithdrawnAdapter": record({"withdrawn": STRING}),
    "Model": derived(ModelEntry),
    "Live": derived(Moment),
    "ModelList": record({"object": {"const": "list"}, "data": array(reference("Model"))}),
    "Tokens": record(
        {"tokens": array(TOKEN), "count": COUNT, "max_model_len": COUNT}, optional={"token_strs": array(STRING)}
    ),
    "Text": record({"content": STRING, "prompt": STRING}),
    "RenderedPrompt": record({"prompt": STRING}),
    "Explanation": EXPLANATION,
    "Capsule": CAPSULE,
    "Front": record({"service": STRING, "about": STRING, "paths": mapping(STRING)}),
    "Health": record(
        {"status": {"enum": ["ok", "loading", "failed"]}}, optional={"models": array(STRING), "failed": array(STRING)}
    ),
    "Ready": record({"status": {"enum": ["ok", "unready"]}}, optional={"reason": STRING}),
    "Props": record(
        {
            "default_generation_settings": record({"n_ctx": COUNT, "params": OBJECT}),
            "model_alias": STRING,
            "model_path": STRING,
            "n_ctx": COUNT,
            "n_vocab": COUNT,
            "chat_template": STRING,
        }
    ),
    "TokenizerInfo": record(
        {
            "tokenizer_class": STRING,
            "model_max_length": COUNT,
            **dict.fromkeys(SPECIAL_TOKENS, nullable(STRING)),
            "chat_template": nullable(STRING),
        }
    ),
    "Adapters": array(record({"id": COUNT, "path": STRING, "scale": NUMBER, "name": STRING})),
    "Dialects": record({"object": {"const": "list"}, "header": STRING, "default": STRING, "data": array(OBJECT)}),
}

COUNTS = [name for name in SUMS if name not in ("engine_ns", "cost")]
AMOUNT: Schema = {"type": "number", "exclusiveMinimum": 0}
BUDGET: Schema = {"type": "number", "minimum": LEAST_BUDGET, "maximum": MOST_BUDGET}
SCOPES = array({"enum": list(Scope)})
LIMITS: Mapping[str, Schema] = {name: nullable(BUDGET if name in BUDGETS else POSITIVE) for name in Meter}
TENANT: Mapping[str, Schema] = {
    "weight": {"type": "number", "minimum": LEAST_WEIGHT, "maximum": MOST_WEIGHT},
    "priority": {"enum": list(get_args(Priority))},
    "models": array(STRING),
    "publishes": array(STRING),
    "limits": record(optional=LIMITS, is_closed=True),
    "max_n": nullable(POSITIVE),
    "max_tokens": nullable(POSITIVE),
    "cors_origins": array(STRING),
    "cache_group": nullable(STRING),
    "log_texts": {"type": "number", "minimum": 0, "maximum": 1},
    "resumes": {"type": "boolean"},
}
KEY: Mapping[str, Schema] = {
    "id": STRING,
    "tenant": STRING,
    "scopes": SCOPES,
    "created_at": NUMBER,
    "expires_at": nullable(NUMBER),
    "revoked_at": nullable(NUMBER),
}
EVENT: Mapping[str, Schema] = {
    "id": INTEGER,
    "at": NUMBER,
    "actor": STRING,
    "action": STRING,
    "subject": STRING,
    "details": OBJECT,
}


FILE: Mapping[str, Schema] = {
    "id": STRING,
    "object": {"const": "file"},
    "bytes": COUNT,
    "created_at": COUNT,
    "expires_at": nullable(COUNT),
    "filename": STRING,
    "purpose": {"enum": ["batch", "batch_output"]},
    "status": {"const": "processed"},
}
PAGE: Mapping[str, Schema] = {"has_more": BOOLEAN, "first_id": nullable(STRING), "last_id": nullable(STRING)}
WINDOW: Schema = {**STRING, "pattern": "^[1-9][0-9]{0,2}h$"}
EXPIRY = record({"anchor": {"const": "created_at"}, "seconds": POSITIVE}, is_closed=True)
BATCH: Mapping[str, Schema] = {
    "id": STRING,
    "object": {"const": "batch"},
    "endpoint": {"enum": list(ENDPOINTS)},
    "model": nullable(STRING),
    "input_file_id": STRING,
    "completion_window": WINDOW,
    "status": {"enum": list(BatchState)},
    "errors": nullable(record({"object": {"const": "list"}, "data": array(OBJECT)})),
    "output_file_id": nullable(STRING),
    "error_file_id": nullable(STRING),
    "metadata": nullable(mapping(STRING)),
    "created_at": COUNT,
    "expires_at": COUNT,
    **{f"{state}_at": nullable(COUNT) for state in BatchState if state is not BatchState.VALIDATING},
    "request_counts": record(dict.fromkeys(("total", "completed", "failed"), COUNT)),
    "usage": record(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT)),
    "cost": NUMBER,
}


def _list_of(name: str, **beside: Schema) -> Schema:
    return record({"object": {"const": "list"}, "data": array(reference(name)), **beside})


ADMIN_SCHEMAS: Mapping[str, Schema] = {
    "Tenant": record({"name": STRING, **TENANT}),
    "NewTenant": record({"name": STRING}, optional=TENANT, is_closed=True),
    "TenantChange": record({}, optional={"name": STRING, **TENANT}, is_closed=True),
    "AllTenants": record({"tenants": array(reference("NewTenant"))}, optional={"dry_run": BOOLEAN}, is_closed=True),
    "Difference": record({"added": array(reference("Tenant")), "changed": OBJECT, "removed": array(STRING)}),
    "Removed": record({"removed": STRING}),
    "TenantList": _list_of("Tenant"),
    "Key": record(KEY, optional={"is_valid": BOOLEAN}),
    "KeyList": _list_of("Key"),
    "NewKey": record({"tenant": STRING}, optional={"scopes": SCOPES, "lifetime_s": nullable(AMOUNT)}, is_closed=True),
    "Rotation": record({}, optional={"overlap_s": nullable({**COUNT, "type": "number"})}, is_closed=True),
    "ShownKey": record({**KEY, "key": STRING}),
    "Event": record(EVENT),
    "EventList": _list_of("Event", has_more=BOOLEAN),
    "Usage": record(
        {**dict.fromkeys(COUNTS, COUNT), "engine_seconds": NUMBER, "cost": NUMBER},
        optional=dict.fromkeys(DIMENSIONS, STRING),
    ),
    "UsageList": _list_of("Usage", columns=mapping(STRING)),
    "File": record(FILE),
    "FileList": _list_of("File", **PAGE),
    "NewFile": record(
        {"file": {**STRING, "format": "binary"}, "purpose": {"const": "batch"}},
        optional={"expires_after[anchor]": {"const": "created_at"}, "expires_after[seconds]": STRING},
        is_closed=True,
    ),
    "DeletedFile": record({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": record(BATCH),
    "BatchList": _list_of("Batch", **PAGE),
    "NewBatch": record(
        {"input_file_id": STRING, "endpoint": {"enum": list(ENDPOINTS)}, "completion_window": WINDOW},
        optional={"metadata": nullable(mapping(STRING)), "output_expires_after": nullable(EXPIRY)},
        is_closed=True,
    ),
}
