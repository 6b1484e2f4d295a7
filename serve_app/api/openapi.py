"""The OpenAPI document of the whole service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from serve_app.api.adapters import LOAD, UNLOAD
from serve_app.api.contradictions import continued, excluded
from serve_app.api.dialects import DIALECTS, HEADER, LLAMA_CPP, UNLIMITED, Dialect
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.forms.form import Parameter, Terms
from serve_app.api.forms.schema import BOOLEAN, NOTHING, STRING, Schema, either, nullable, record, reference
from serve_app.api.groups import StreamOptions
from serve_app.api.limits import WireLimits
from serve_app.api.native import ASKED, INFILL, NEEDLESS, NOT_NATIVE
from serve_app.api.parameters import STREAM_OPTIONS, Carried, Inert, NotYet, Renamed, form_of
from serve_app.api.parse import CHAT, COMPLETION, NATIVE, Body
from serve_app.api.paths import OF_ADAPTERS, OPEN, SERVICES, AdminPath, Path, Service
from serve_app.api.responding import RESPONSES
from serve_app.api.responses import IGNORED, RESUMABLE, SEED, SERVED, SUFFIX_MODE, TOOL_PROMPT, TRUNCATED, UNENFORCED
from serve_app.api.schemas import ADMIN_SCHEMAS, SCHEMAS
from serve_app.api.scoring import INPUT_ROUTES
from serve_app.api.tokenize import APPLY_TEMPLATE, CONVERSED, DETOKENIZE, SPECIAL_NAMES, TEXT_NAMES, TOKENIZE
from serve_app.core.version import service_version

ERRORS = {
    400: "The request is malformed or a parameter is out of its range; `param` names it.",
    403: "The request asks for what no client may have.",
    404: "There is no such model, adapter or route.",
    405: "The route has other methods; `Allow` names them.",
    408: "The body did not arrive in time.",
    409: "The stream was fetched anew elsewhere; within a stream only.",
    413: "The body is larger than the server reads.",
    415: "The body is not JSON, or in an encoding other than gzip.",
    422: "As 400, in the dialect mistral.rs.",
    429: "A limit of the key's tenant has too little left; repeat after `Retry-After` seconds.",
    500: "The server failed.",
    501: "The model that was asked is not made for this route.",
    503: "No replica is ready, or every queue is full; repeat after `Retry-After` seconds.",
    504: "The request took longer than the server's limit, or `X-Request-Timeout`.",
}
OF_BODIES = frozenset({408, 413, 415})
"""Errors that only a route with a body has."""
TOLD_HEADERS: dict[str, Any] = {
    HEADER: {"description": "The dialect that was spoken.", "schema": STRING},
    SERVED: {
        "description": "The model that answers, each adapter with its version; also an address for `model`.",
        "schema": STRING,
    },
    SEED: {"description": "The seed that was sent or drawn.", "schema": STRING},
    RESUMABLE: {
        "description": "Of a stream: whether its client can fetch it anew, should it break off.",
        "schema": {"enum": ["true", "false"]},
    },
    IGNORED: {
        "description": "Names that are no parameters, percent-encoded; `+n` stands for n more.",
        "schema": STRING,
    },
    SUFFIX_MODE: {
        "description": "Where there is a suffix: whether the model filled the gap before it, or it was appended.",
        "schema": {"enum": ["fim", "append"]},
    },
    TOOL_PROMPT: {
        "description": "Where a default text shows the model the tools, as its chat template does not.",
        "schema": {"const": "default"},
    },
    TRUNCATED: {"description": "Tokens that prompts lost at their beginning.", "schema": STRING},
    UNENFORCED: {"description": "Values of `format` in a JSON schema that count as annotations.", "schema": STRING},
}
_NO_CHAT = dict.fromkeys(CONVERSED, NOTHING)


def _parameter(name: str, place: str = "header", schema: Schema = STRING, description: str = "") -> dict[str, Any]:
    told = {"description": description} if description else {}
    return {"name": name, "in": place, "required": place == "path", "schema": schema, **told}


DIALECT_HEADER = _parameter(
    HEADER,
    schema={"enum": list(DIALECTS)},
    description="Whose defaults and meanings hold; each is described at /v1/dialects.",
)
TIMEOUT_HEADER = _parameter(
    "X-Request-Timeout",
    schema={"type": "number", "exclusiveMinimum": 0},
    description="Seconds that the request may take in all, where that is less than the server gives it.",
)
CAPSULE_HEADER = _parameter(
    "X-Capsule",
    schema={"const": "true"},
    description="Keep an answer that is no stream, too, as streams are: its capsule is at /v1/capsules/{id}.",
)
RESPONSE_ID = _parameter("id", "path", description="Of the response.")
MODEL_QUERY = _parameter("model", "query")
MODEL_PATH = _parameter("id", "path", description="May hold `:` and `/`.")


def openapi_document(limits: WireLimits, dialect: Dialect, *, asks_for_keys: bool = False) -> dict[str, Any]:
    """dialect: of requests that name none; defaults and ranges are told as it has them"""
    terms = Terms(limits=limits, dialect=dialect)
    paths: dict[str, Any] = {
        **{path: {path.method.lower(): operation} for path, operation in _operations().items()},
        **{path.value: _admin_operations(path) for path in sorted(OF_ADAPTERS)},
    }
    document = {
        "openapi": "3.1.0",
        "info": {"title": "serve_app", "version": service_version(), "description": "Text completions of many models."},
        "paths": paths,
        "components": {
            "schemas": {
                **SCHEMAS,
                "CompletionRequest": body_schema(COMPLETION, terms),
                "ChatRequest": body_schema(CHAT, terms),
                "ResponsesRequest": body_schema(RESPONSES, terms),
                "NativeRequest": native_schema(Terms(limits=limits, dialect=LLAMA_CPP)),
                "InfillRequest": _infill(Terms(limits=limits, dialect=LLAMA_CPP)),
                **{kind.described[1]: _inputs_schema(kind, terms) for kind in INPUT_ROUTES.values()},
                "TokenizeRequest": _tokenize(terms),
                "ApplyTemplateRequest": {
                    **_object(APPLY_TEMPLATE, terms, asked="messages"),
                    "not": {"anyOf": continued()},
                },
                "DetokenizeRequest": _object(DETOKENIZE, terms, asked="tokens"),
                "LoadAdapter": {**_object(LOAD, terms, asked="lora_name"), "required": ["lora_name", "lora_path"]},
                "UnloadAdapter": _object(UNLOAD, terms, asked="lora_name"),
            }
        },
    }
    return with_keys(document) if asks_for_keys else document


def _operations() -> dict[Path, dict[str, Any]]:
    native = _completions("NativeRequest", "NativeCompletion", "NativeResult", has_end=False)
    health = _with_response(
        _operation("Whether every known model has a replica", "Health"), 503, ERRORS[503], _json("Health")
    )
    ready = _with_response(
        _operation("Whether this router can serve anything", "Ready"), 503, ERRORS[503], _json("Ready")
    )
    return {
        Path.COMPLETIONS: _completions("CompletionRequest", "Completion", "CompletionChunk", has_end=True),
        Path.CHAT: _completions("ChatRequest", "ChatCompletion", "ChatChunk", has_end=True, summary="Answer a chat"),
        Path.COMPLETION: _fetched("CompletionChunk"),
        Path.CHAT_COMPLETION: _fetched("ChatChunk"),
        Path.CAPSULE: _operation("What a completion came of, and what it was", "Capsule", parameters=[RESPONSE_ID]),
        Path.RESPONSES: _completions(
            "ResponsesRequest", "Response", "ResponseEvent", has_end=False, summary="Answer a chat in items"
        ),
        **{path: _inputs(kind) for path, kind in INPUT_ROUTES.items()},
        Path.NATIVE_COMPLETION: native,
        Path.NATIVE_COMPLETIONS: native,
        Path.INFILL: _completions("InfillRequest", "NativeCompletion", "NativeResult", has_end=False),
        Path.TOKENIZE: _operation("Cut a text into tokens", "Tokens", body="TokenizeRequest"),
        Path.DETOKENIZE: _operation("Give the text of tokens", "Text", body="DetokenizeRequest"),
        Path.APPLY_TEMPLATE: _operation("Give the prompt of a chat", "RenderedPrompt", body="ApplyTemplateRequest"),
        Path.EXPLAIN: _explain(),
        Path.TOKENIZER_INFO: _operation("The tokenizer of a model", "TokenizerInfo", parameters=[MODEL_QUERY]),
        Path.MODELS: _operation("List the models", "ModelList"),
        Path.MODEL: _operation("One model", "Model", parameters=[MODEL_PATH]),
        Path.DIALECTS: _operation("What each dialect makes of every parameter", "Dialects"),
        Path.PROPS: _operation("Properties of a model", "Props", parameters=[MODEL_QUERY]),
        Path.ADAPTERS: _operation("Adapters of a model", "Adapters", parameters=[MODEL_QUERY]),
        Path.LOAD_ADAPTER: _operation("Publish an adapter", {"text/plain": {}}, body="LoadAdapter"),
        Path.UNLOAD_ADAPTER: _operation("Serve an adapter no longer", {"text/plain": {}}, body="UnloadAdapter"),
        Path.HEALTH: health,
        Path.V1_HEALTH: health,
        Path.READY: ready,
        **_pages(),
    }


def _pages() -> dict[Path, dict[str, Any]]:
    """Return the operations of routes that tell of the service itself."""
    return {
        Path.FRONT: _with_response(
            _operation("What this is, and where to go on; a browser is sent to the console", "Front"),
            302,
            "HTML is accepted.",
        ),
        Path.METRICS: _operation("Metrics for Prometheus", {"text/plain": {}}),
        Path.DESCRIPTION: _operation("This document", {"application/json": {}}),
        Path.DOCS: _operation("This document, to be read", {"text/html": {}}),
        Path.LIVE: _operation(
            "Replicas and queues now; once a second where events are accepted",
            _json("Live") | _events(JSON_TEXT, "A `Live`."),
        ),
        Path.CONSOLE: _with_response(
            _operation("The console, a page for people", {"text/html": {}}), 308, "There is a slash too many."
        ),
        Path.CONSOLE_FILE: _operation(
            "What the console's page is made of",
            {"text/javascript": {}, "text/css": {}},
            parameters=[_parameter("file", "path")],
        ),
    }


def _completions(
    body: str, answer: str, chunk: str, *, has_end: bool, summary: str = "Complete prompts"
) -> dict[str, Any]:
    """Return the operation of a route that may stream."""
    content = _json(answer) | _events(_data(chunk, has_end=has_end), "Where `stream` is true.")
    parameters = [DIALECT_HEADER, TIMEOUT_HEADER] + has_end * [CAPSULE_HEADER]
    return _operation(summary, content, body=body, parameters=parameters, headers=TOLD_HEADERS)


def _fetched(chunk: str) -> dict[str, Any]:
    """Return the operation of a route that tells a stream again and goes on with it."""
    last_id = _parameter(
        "Last-Event-ID", "header", description="The id of the last event that came; left out for the whole stream."
    )
    return _operation(
        "Fetch a stream anew, behind what came of it",
        _events(_data(chunk, has_end=True), "What is left of it."),
        parameters=[RESPONSE_ID, last_id, TIMEOUT_HEADER],
        headers=TOLD_HEADERS,
    )


def _inputs(kind: type[EmbeddingRequest]) -> dict[str, Any]:
    summary, body, answer = kind.described
    told = {name: TOLD_HEADERS[name] for name in (HEADER, SERVED, IGNORED, TRUNCATED)}
    return _operation(summary, answer, body=body, parameters=[DIALECT_HEADER, TIMEOUT_HEADER], headers=told)


def _explain() -> dict[str, Any]:
    operation = _operation(
        "Say what a request would do", "Explanation", body="CompletionRequest", parameters=[DIALECT_HEADER]
    )
    bodies = either(reference("CompletionRequest"), reference("ChatRequest"))
    operation["requestBody"]["content"] = {"application/json": {"schema": bodies}}
    return operation


JSON_TEXT: Schema = {**STRING, "contentMediaType": "application/json"}


def _data(chunk: str, *, has_end: bool) -> Schema:
    """Return the schema of an event's data: a chunk, an error after which nothing comes, or the end."""
    data = {**JSON_TEXT, "contentSchema": either(reference(chunk), reference("Error"))}
    return either(data, {"const": "[DONE]"}) if has_end else data


def _events(data: Schema, description: str) -> dict[str, Any]:
    """Return the content of a stream of events.

    `itemSchema` is a word of OpenAPI 3.2 that readers of 3.1 ignore, as they would any they do not know.
    """
    return {"text/event-stream": {"itemSchema": {**record({"data": data}), "description": description}}}


def _operation(
    summary: str,
    answer: str | dict[str, Any],
    *,
    body: str | None = None,
    parameters: Sequence[dict[str, Any]] = (),
    errors: Mapping[int, str] | None = None,
    headers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """answer: the name of its schema, or its content by media type;  body: the name of its schema"""
    if errors is None:
        errors = {status: text for status, text in ERRORS.items() if body is not None or status not in OF_BODIES}
    content = _json(answer) if isinstance(answer, str) else answer
    told = {"headers": headers} if headers else {}
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content, **told}, **_told(errors)},
        **({} if body is None else {"requestBody": {"required": True, "content": _json(body)}}),
        **({"parameters": list(parameters)} if parameters else {}),
    }


def _with_response(
    operation: dict[str, Any], status: int, description: str, content: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the operation with one more response; a plain text where no content is given."""
    response = {"description": description, "content": content or {"text/plain": {}}}
    return {**operation, "responses": {**operation["responses"], str(status): response}}


def _told(errors: Mapping[int, str]) -> dict[str, Any]:
    return {str(status): {"description": text, "content": _json("Error")} for status, text in errors.items()}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": reference(name)}}


def _infill(terms: Terms) -> Schema:
    """Return the schema of a native body whose prompt is a gap."""
    schema = native_schema(terms)
    others = {name: each for name, each in schema["properties"].items() if name not in NEEDLESS}
    own = _properties(INFILL, terms, asked=ASKED)["properties"]
    others["truncate_sequence"] = {**others["truncate_sequence"], "default": True}
    return {**schema, "required": list(ASKED), "properties": {**others, **own}}


def _tokenize(terms: Terms) -> Schema:
    texts = [{**_one_of(name), "properties": {**_one_of(name)["properties"], **_NO_CHAT}} for name in TEXT_NAMES[:2]]
    either = [*texts, _one_of("messages")]
    twice = {"required": list(SPECIAL_NAMES), "properties": dict.fromkeys(SPECIAL_NAMES, BOOLEAN)}
    return {
        "type": "object",
        "oneOf": either,
        "not": {"anyOf": [twice, *continued()]},
        **_properties(TOKENIZE, terms, asked=()),
    }


def _one_of(name: str) -> Schema:
    """Return the schema of a body with a text under this name and nothing under the others."""
    others = [other for other in TEXT_NAMES if other != name]
    return {"required": [name], "properties": {name: {"not": NOTHING}, **dict.fromkeys(others, NOTHING)}}


def _object(table: Mapping[str, Parameter], terms: Terms, *, asked: str) -> Schema:
    """Return the schema of a body that is read by a table; one of its members is required."""
    return {"type": "object", "required": [asked], **_properties(table, terms, asked=(asked,))}


def _inputs_schema(kind: type[EmbeddingRequest], terms: Terms) -> Schema:
    table = {name: each.parameter for name, each in kind.table.items() if isinstance(each, Carried)}
    described = _properties(table, terms, asked=kind.required) | {"additionalProperties": True}
    return {"type": "object", "required": list(kind.required), **described}


def _properties(table: Mapping[str, Parameter], terms: Terms, *, asked: tuple[str, ...]) -> Schema:
    """Return the schemas of members; all but those asked for may be null."""
    schemas = {name: parameter.form.schema(terms) for name, parameter in table.items()}
    return {
        "properties": {
            name: {**(schema if name in asked else nullable(schema)), "description": table[name].about}
            for name, schema in schemas.items()
        },
        "additionalProperties": NOTHING,
    }


SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer sa-…`"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
REFUSALS = {
    401: "There is no key, or one that is unknown, has expired or was revoked.",
    403: "The key is for something else, or the folder is not allowed.",
}
FAILURES = {
    **{status: ERRORS[status] for status in (405, 408, 409, 413, 500)},
    403: REFUSALS[403],
    400: "A field is unknown or out of its range; the message names it.",
    404: "There is no such tenant, key, adapter, file or batch.",
    415: "The body is not JSON.",
    503: "The store does not answer, or no replica is ready; repeat after `Retry-After` seconds.",
}


def with_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the same service where it asks for keys."""
    every = {**document["paths"], **{path.value: _admin_operations(path) for path in AdminPath}}
    paths: dict[str, Any] = {
        path: {method: {**each, **_guarded(path, each["responses"])} for method, each in operations.items()}
        for path, operations in every.items()
    }
    components = document["components"]
    return {
        **document,
        "security": [{name: []} for name in SCHEMES],
        "paths": paths,
        "components": {"schemas": {**components["schemas"], **ADMIN_SCHEMAS}, "securitySchemes": SCHEMES},
    }


def _guarded(path: str, responses: dict[str, Any]) -> dict[str, Any]:
    if path in OPEN:
        return {"security": []}
    return {"responses": {**responses, **_told(REFUSALS)}}


def _admin_operations(path: AdminPath) -> dict[str, Any]:
    return {method.lower(): _admin_operation(path, each) for (of, method), each in SERVICES.items() if of is path}


def _admin_operation(path: AdminPath, service: Service) -> dict[str, Any]:
    parameters = [
        *(_parameter(name, "path") for name in ("name", "id") if f"{{{name}}}" in path),
        *(_parameter(name, "query") for name in service.query),
    ]
    answer: str | dict[str, Any] = service.answer or {"application/octet-stream": {}}
    operation = _operation(service.summary, answer, body=service.body, parameters=parameters, errors=FAILURES)
    if service.body is not None:
        operation["requestBody"]["required"] = service.name != "rotate_key"
    if service.name == "add_file":
        operation["requestBody"]["content"] = {"multipart/form-data": {"schema": reference("NewFile")}}
    return operation


NOT_CARRIED_OUT = "Not carried out by this server."
CHANGES_NO_ANSWER: Schema = {"description": "Changes no answer; it is told in the header X-Ignored-Parameters."}
UNKNOWN_NAMES = (
    "A name that is none of these is ignored and told in the header X-Ignored-Parameters, unless it looks like a"
    " misspelled one. The dialects openai and fireworks refuse it."
)


def body_schema(kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of one kind of body in one dialect."""
    has_default_model = (kind.default_model or terms.dialect.default_model) is not None
    properties = {name: _property(name, kind, terms) for name in kind.table}
    properties["stream_options"]["anyOf"] = [_options(terms), NOTHING]
    schema = {
        "type": "object",
        "required": list(kind.required),
        "additionalProperties": NOTHING if terms.dialect.refuses_unknown else True,
        "description": UNKNOWN_NAMES,
        "properties": properties,
        "not": {"anyOf": excluded(terms, kind.table)},
    }
    return with_optional_model(schema) if has_default_model else schema


def native_schema(terms: Terms) -> Schema:
    """Return the schema of llama.cpp's own routes, which need no model if one is served, and rank nothing."""
    schema = with_optional_model(body_schema(NATIVE, terms))
    for name in NOT_NATIVE:
        neutral = {"enum": [False, None]} if name.startswith("return_") else NOTHING
        schema["properties"][name] = {**neutral, "description": "Carried out at /v1/completions only."}
    return schema


def with_optional_model(schema: Schema) -> Schema:
    """Return the same schema with an optional `model`."""
    model = dict(schema["properties"]["model"])
    about = {"description": model.pop("description")}
    properties = {**schema["properties"], "model": {**nullable(model), **about}}
    return {**schema, "required": [name for name in schema["required"] if name != "model"], "properties": properties}


def _options(terms: Terms) -> Schema:
    """Return the schema of `stream_options`."""
    return {
        "type": "object",
        "properties": {
            name: {**nullable(BOOLEAN), "description": each.parameter.about}
            if isinstance(each, Carried)
            else CHANGES_NO_ANSWER
            for name, each in STREAM_OPTIONS.items()
        },
        "additionalProperties": NOTHING if terms.dialect.refuses_unknown else True,
    }


def _property(name: str, kind: Body[Any], terms: Terms) -> Schema:
    match kind.table[name]:
        case Carried(parameter):
            described = f"{parameter.about} Must be {parameter.form.words(terms)}."
            return {**_value_schema(name, kind, terms), "description": described}
        case Renamed() as disposition:
            described = f"Another name of `{disposition.to}`. {disposition.besides}".rstrip()
            return {**_renamed_schema(name, disposition, kind, terms), "description": described}
        case Inert():
            return CHANGES_NO_ANSWER
        case NotYet() as disposition:
            return {"enum": [*disposition.neutral, None], "description": f"{NOT_CARRIED_OUT} {disposition.instead}"}
        case _ as disposition:
            assert_never(disposition)


def _value_schema(name: str, kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of a parameter's own name; null means the default unless the parameter is required."""
    schema = form_of(name, kind.table).schema(terms)
    if name in kind.required:
        return schema
    return {**nullable(*_forms(schema)), "default": _default(name, kind, terms)}


def _renamed_schema(name: str, disposition: Renamed, kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of another name of a parameter."""
    values = [*_forms(form_of(name, kind.table).schema(terms)), *({"const": value} for value in disposition.absent)]
    return {**nullable(*values), "default": None if disposition.besides else _default(disposition.to, kind, terms)}


def _forms(schema: Schema) -> list[Schema]:
    return list(schema.get("anyOf") or [schema])


def _default(name: str, kind: Body[Any], terms: Terms) -> object:
    field = kind.request.model_fields.get(name)
    value = None if field is None or field.is_required() else field.get_default()
    value = {**kind.defaults, **terms.dialect.defaults}.get(name, value)
    is_unlimited = name == "max_tokens" and value == UNLIMITED
    if isinstance(value, StreamOptions) or (is_unlimited and not terms.dialect.takes_unlimited_tokens):
        return None  # means the same, and may be sent
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
