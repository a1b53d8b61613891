"""The table of routes: the application, its guards and its documentation are made from it.

Runs on: loop.
"""

from . import cache_events, native_api, openai_api, openapi
from .openai_types import ChatRequest, CompletionRequest
from .openapi import Route

TABLE = (
    Route(
        "POST",
        "/v1/chat/completions",
        openai_api.chat_completions,
        ChatRequest,
        openapi.ChatCompletion,
        is_work=True,
        may_stream=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        openai_api.completions,
        CompletionRequest,
        openapi.Completion,
        is_work=True,
        may_stream=True,
    ),
    Route("GET", "/v1/models", openai_api.list_models, None, openapi.Models),
    Route(
        "GET", "/v1/models/{id:.+}", openai_api.retrieve_model, None, openapi.Model, statuses=(404,)
    ),
    Route(
        "POST",
        "/generate",
        native_api.generate,
        native_api.GenerateRequest,
        dict | list,
        is_work=True,
        may_stream=True,
    ),
    Route(
        "POST",
        "/tokenize",
        native_api.tokenize,
        (native_api.TokenizeRequest, native_api.TokenizeChatRequest),
        openapi.Tokenized,
        statuses=(404,),
    ),
    Route("GET", "/tokenizer_info", native_api.tokenizer_info),
    Route(
        "POST",
        "/detokenize",
        native_api.detokenize,
        native_api.DetokenizeRequest,
        openapi.Detokenized,
        statuses=(404,),
    ),
    Route("POST", "/abort_request", native_api.abort, native_api.AbortRequest, statuses=(403,)),
    Route("POST", "/abort", native_api.abort, native_api.AbortRequest, statuses=(403,)),
    Route("POST", "/flush_cache", native_api.flush_cache, access="admin"),
    Route(
        "GET",
        "/cache_events",
        cache_events.cache_events,
        answer="text/event-stream",
        access="admin",
        statuses=(400,),
    ),
    Route("GET", "/server_info", native_api.server_info),
    Route("GET", "/version", native_api.show_version),
    Route("GET", "/", native_api.home, access="open"),
    Route("GET", "/health", native_api.health, access="open"),
    Route("GET", "/ready", native_api.ready, access="open"),
    Route("GET", "/metrics", native_api.metrics, answer="text/plain", access="open"),
    Route("GET", "/openapi.json", openapi.openapi_json),
    Route("GET", "/docs", openapi.docs, answer="text/html"),
)
