"""vLLM's API layer over the control plane.

Written for the releases named in ``engine_versions.py``; each use of a non-public API has a comment
with the reason. To be imported after ``set_engine_environment``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import types
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.engine_options.parsing import default_arguments, media_limits, parse_options
from gpupoold.equal_tokenizers import share_tokenizers
from gpupoold.frontend import pool_client, vllm_bounds, vocabulary
from gpupoold.frontend.answer_fields import completing, name_errors_of_streams
from gpupoold.frontend.errors import not_understood
from gpupoold.frontend.gates import has_asked
from gpupoold.frontend.grammars import GrammarVetting
from gpupoold.frontend.large_answers import make_large_answers_apart
from gpupoold.frontend.rendering import MAX_PIXELS, bound_media, bound_rendering, count_features
from gpupoold.frontend.request_context import make_engine_id, name_as_requested, name_responses
from gpupoold.stats.histogram import Histogram
from gpupoold.wire.messages import LoadedModel, ModelToLoad, RequestProgress, StepOutputs

# Work per request that gpupool does itself (metrics) or does not need.
_UNUSED_MIDDLEWARE = frozenset(
    {"PrometheusInstrumentatorMiddleware", "ScalingMiddleware", "CORSMiddleware"}
)


_PROCESSED_IMAGES_GIB = 0.125

# Threads that tokenise, of which vLLM has two for each model; more get more copies.
_TOKENIZING_THREADS = 2

# Errors raised by code that did not validate its input; vLLM answers the last two itself.
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError)
_ALL_FAULTS = (*_FAULTS, TypeError, ValueError)

_TOOL_OPTION = "--tool-call-parser"
_STORE_VARIABLE = "VLLM_ENABLE_RESPONSES_API_STORE"
_NO_BACKGROUND = (
    "Responses are not stored here, so `background` is not supported: leave the field out. For "
    "work without a waiting client there are batches, `/v1/batches`."
)


class PoolLLM(AsyncLLM):  # type: ignore[misc, unused-ignore]
    """An ``AsyncLLM`` whose engine is the control plane.

    Its Prometheus shutdown has no effect here (no multiprocess directory is ever set), so closing
    one model leaves the others unaffected.
    """

    engine_core: Any
    output_handler: asyncio.Task[None] | None

    def __init__(
        self,
        config: VllmConfig,
        client: pool_client.PoolClient,
        grammars: vllm_bounds.ModelGrammars,
        joins: bool,
    ) -> None:
        """With ``joins`` False the steps of a stream stay apart."""
        with _engine_client(client):
            super().__init__(
                config, Executor.get_class(config), log_stats=False, log_requests=False
            )
        vllm_bounds.bound_renderer(self.renderer, config.model_config.max_model_len)
        bound_media(self.renderer)
        self.input_processor.assign_request_id = _assign_request_id
        vocabulary.decode_tokens_once()
        self._grammars = grammars
        self._joins = joins
        # Turns off vLLM's validation of grammars, which have been vetted before.
        self.input_processor.structured_outputs_config = None

    @property
    def errored(self) -> bool:
        """Never: a stopped client refuses requests with the reason."""
        return False

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a request, after checks of its work and its log-probabilities.

        The API makes the generators of all prompts before it begins with the first.
        """
        vllm_bounds.check_work(sampling_params)
        vllm_bounds.limit_logprobs(prompt, sampling_params, self.model_config)
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(
            prompt, sampling_params, request_id, **kwargs
        )
        return outputs

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the result of an input, once the HTTP request may begin with one more."""
        async with vllm_bounds.input_slot():
            async for output in super().encode(*args, **kwargs):
                yield output

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a request to the pool; vLLM's errors before that become 400."""
        vllm_bounds.check_words(params)
        count_features(prompt, getattr(params, "n", 1))
        if vocabulary.has_logprobs(params):
            await vocabulary.prepare_texts(self.renderer.tokenizer)
        params = await self._grammars.vetted(params)
        try:
            queue = await super().add_request(request_id, prompt, params, *args, **kwargs)
        except _ALL_FAULTS as error:
            if isinstance(error, VLLMError):
                raise
            raise VLLMValidationError(str(not_understood(error))) from error
        return queue if self._joins else pool_client.keep_steps_apart(queue)

    def _run_output_handler(self) -> None:
        # An output that vLLM cannot process ends its handler after failing all open requests;
        # the next request starts another, so one bad output does not end the model.
        handler = self.output_handler
        if handler is not None and handler.done() and not self.engine_core.stopped:
            self.output_handler = None
        super()._run_output_handler()


class VllmModelApi:
    """One model's FastAPI application and the ``AsyncLLM`` behind it (a ``ModelApi``)."""

    def __init__(
        self,
        model: ModelToLoad,
        loaded: LoadedModel,
        send: Callable[[msgspec.Struct], None],
        vetting: GrammarVetting,
        on_prefilled: Callable[[str, int], None],
    ) -> None:
        """May take some 100 ms; one call at a time, in a thread.

        ``on_prefilled`` gets each request's id and its cached prompt tokens.
        """
        vllm_bounds.keep_grammars_off_the_loop()
        bound_rendering()
        share_tokenizers(_TOKENIZING_THREADS)
        self._args = _arguments(model, loaded)
        self._adapters = model.adapters
        config = engine_config(model, loaded)
        self._tasks: Any = tuple(loaded.supported_tasks)
        joins = pool_client.reads_joined_steps(self._args.tool_call_parser)
        on_unreadable = functools.partial(self.fail, message=_GARBLED)
        limits = pool_client.EngineLimits(
            model.name,
            self._tasks,
            model.targets.tbt_s,
            config.model_config.get_vocab_size(),
            vocabulary.num_embeddings(config.model_config),
        )
        self._client = pool_client.PoolClient(
            limits, send, on_unreadable, on_prefilled, joins=joins
        )
        grammars = vllm_bounds.ModelGrammars(vetting, model, loaded)
        self._llm = PoolLLM(config, self._client, grammars, joins)
        self._client.slow_outputs = vocabulary.PromptLogprobs(
            self._llm.output_processor.request_states
        )
        self._app = build_app(self._args, self._tasks, config.model_config)
        self._app.user_middleware = [
            middleware
            for middleware in self._app.user_middleware
            if getattr(middleware.cls, "__name__", "") not in _UNUSED_MIDDLEWARE
        ]
        for kind in _FAULTS:
            self._app.add_exception_handler(kind, _on_fault)
        self._app.add_exception_handler(pool_client.RequestLost, _on_lost)
        # vLLM's SageMaker bootstrap has built the stack with all of them already.
        self._app.middleware_stack = None
        self.paths = frozenset(getattr(route, "path", "") for route in self._app.routes)
        self._init_state()

    def _init_state(self) -> None:
        state, args = self._app.state, self._args
        # Computed once, because each of vLLM's six serving classes would hash the configuration.
        args.fingerprint_value = build_system_fingerprint(
            self._llm.vllm_config, args.fingerprint_mode, args.fingerprint_value
        )
        args.fingerprint_mode = "none" if args.fingerprint_value is None else "custom"
        # On a loop of its own: no part binds to a loop before its first request.
        asyncio.run(init_app_state(self._llm, state, args, self._tasks))
        # Not by vLLM's loading of adapters: the engines have the adapters, by the daemon's numbers.
        state.openai_serving_models.lora_requests.update(
            (
                adapter.name,
                LoRARequest(
                    adapter.name, adapter.number, adapter.name, self._args.served_model_name[0]
                ),
            )
            for adapter in self._adapters
        )
        change_handlers(state, self._llm.model_config)
        # vLLM's error handler stops its server after an error, which must not stop this server.
        state.server = types.SimpleNamespace(should_exit=False)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request in the application; its answer is completed on the way."""
        await self._app(scope, receive, completing(scope["path"], send))

    def push(self, outputs: StepOutputs) -> None:
        if not outputs.frames:
            self._refuse_probabilities(outputs.progress)
        errors = [item.request_id for item in outputs.progress if item.finish_reason == _ERROR]
        if errors:
            self._refuse_grammars(errors)
        self._client.push(outputs)

    def _refuse_grammars(self, request_ids: Iterable[str]) -> None:
        """Fail requests whose grammar the engine could not make, before the first token.

        The engine gives such a request up, and the client gets 400 with the reason.
        """
        states = self._llm.output_processor.request_states
        known = (states.get(request_id) for request_id in request_ids)
        refused = [
            request.request_id for request in known if request is not None and request.is_prefilling
        ]
        self.fail(refused, _NO_GRAMMAR, HTTPStatus.BAD_REQUEST)

    def _refuse_probabilities(self, progress: Iterable[RequestProgress]) -> None:
        """Fail requests for log-probabilities at their first synthetic token, which has none."""
        states = self._llm.output_processor.request_states
        wanting = []
        for item in progress:
            state = states.get(item.request_id)
            if state is None or not state.is_prefilling or state.logprobs_processor is None:
                continue
            wanted = state.logprobs_processor
            if wanted.num_logprobs is not None or wanted.num_prompt_logprobs is not None:
                wanting.append(item.request_id)
        if wanting:
            self.fail(wanting, _NO_PROBABILITIES, HTTPStatus.BAD_REQUEST)
            self._client.abort(wanting)

    def fail(
        self,
        request_ids: Iterable[str],
        message: str,
        status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE,
        code: str = "",
    ) -> None:
        # With ``n > 1`` the ids are those of single samples: the whole request fails and its other
        # samples are aborted in the pool.
        failed = set(request_ids)
        self._client.pacer.end(failed)
        processor = self._llm.output_processor
        for request_id in failed:
            state = processor.request_states.get(request_id)
            if state is None or state.queue is None:
                continue
            # The error goes first, so that the abort's output does not replace the error.
            state.queue.put(pool_client.RequestLost(message, status, code))
            whole = request_id if state.parent_req is None else state.parent_req.request_id
            gone = processor.abort_requests([whole], internal=True)
            self._client.abort([sample for sample in gone if sample not in failed])

    def stop(self, message: str) -> None:
        self._client.stop(message)
        open_ids = list(self._llm.output_processor.request_states)
        self.fail(open_ids, message)
        self._client.abort(open_ids)

    def openapi(self) -> dict[str, Any]:
        described: dict[str, Any] = self._app.openapi()
        return described

    def owns_response(self, response_id: str) -> bool:
        serving = getattr(self._app.state, "openai_serving_responses", None)  # off by default
        return serving is not None and response_id in serving.response_store

    def take_paced_gaps(self) -> Histogram:
        return self._client.pacer.take_gaps()

    def close(self) -> None:
        self._client.stop("the model is no longer served")
        self._llm.shutdown()


async def _on_fault(request: Request, error: Exception) -> Response:
    """Answer 400 for a malformed request where vLLM would answer 500."""
    handled = error if has_asked() else VLLMValidationError(str(not_understood(error)))
    return await exception_handler(request, handled)


async def _on_lost(request: Request, error: Exception) -> Response:
    """Answer as vLLM does, with the code of the failure where there is one."""
    response = await exception_handler(request, error)
    if not (isinstance(error, pool_client.RequestLost) and error.code):
        return response
    body = msgspec.json.decode(bytes(response.body))
    body["error"]["code"] = error.code
    return JSONResponse(body, response.status_code)


def _assign_request_id(request: EngineCoreRequest) -> None:
    """Set the engine's id, which vLLM would make of the client's id and 32 random bits."""
    request.external_req_id = request.request_id
    request.request_id = make_engine_id()


_GARBLED = "the engine's output for this request could not be read"
_NO_GRAMMAR = "no grammar can be made of the requested format"
_NO_PROBABILITIES = "logprobs are not available: the tokens of a simulated device are synthetic"


def engine_config(model: ModelToLoad, loaded: LoadedModel) -> VllmConfig:
    arguments = _arguments(model, loaded)
    config: VllmConfig = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    config.cache_config.num_gpu_blocks = loaded.num_gpu_blocks
    config.cache_config.block_size = loaded.block_size
    return config


def _arguments(model: ModelToLoad, loaded: LoadedModel) -> Namespace:
    args = default_arguments()
    found = found_parsers(Path(model.path), model.engine)
    args.enable_auto_tool_choice = found.tool.name is not None
    for name, value in parse_options(model.engine).items():
        setattr(args, name, value)
    args.tool_call_parser = found.tool.name
    # vLLM's command copies the one into the other when the command makes its configuration.
    args.reasoning_parser = found.reasoning.name or ""
    args.structured_outputs_config.reasoning_parser = args.reasoning_parser
    args.model = model.path
    presets = (preset.name for preset in model.presets)
    args.served_model_name = [model.name, *model.aliases, *presets]
    args.dtype = loaded.dtype.removeprefix("torch.")
    args.max_model_len = loaded.max_model_len
    args.trust_remote_code = model.allow_remote_code
    args.enforce_eager = True
    args.disable_log_stats = True
    args.disable_fastapi_docs = True
    # Late interaction would keep the queries' embeddings in one worker between two requests.
    args.enable_flash_late_interaction = False
    args.allowed_media_domains = list(model.media_hosts)
    image_options = (args.media_io_kwargs or {}).get("image", {})
    args.media_io_kwargs = {"image": image_options | {MAX_PIXELS: model.max_image_pixels}}
    args.limit_mm_per_prompt = media_limits(args.limit_mm_per_prompt, model.max_images)
    # Of vLLM's caches of processed media, only the cache for several API processes sends every
    # item with every request.
    args._api_process_count = 2
    args.mm_processor_cache_gb = _PROCESSED_IMAGES_GIB
    return args


_ERROR = str(FinishReason.ERROR)


@contextlib.contextmanager
def _engine_client(client: pool_client.PoolClient) -> Iterator[None]:
    """Substitute vLLM's engine client while an ``AsyncLLM`` is built.

    vLLM has no plug point for the client: the constructor calls this static method. Builds do not
    overlap, so the substitution affects only one build.
    """
    original = EngineCoreClient.make_async_mp_client

    def make_pool_client(*_: object, **__: object) -> pool_client.PoolClient:
        return client

    EngineCoreClient.make_async_mp_client = staticmethod(make_pool_client)  # type: ignore[method-assign, assignment, unused-ignore]
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(original)  # type: ignore[method-assign, unused-ignore]


def change_handlers(state: Any, model_config: Any) -> None:
    """Change the handlers of a new application.

    The handlers get gpupool's bounds, names and messages; requests are answered as by vLLM.
    """
    # vLLM's OnlineRenderer creates the error while rendering a chat; the request's own fields alone
    # do not show whether tools are needed. The options are gpupool's in place of vLLM's.
    model = model_config.served_model_name
    _replace_error(
        state.online_renderer,
        _TOOL_OPTION,
        f"The model `{model}` has no tool parser, because none was found for its chat template. "
        'Send no `tools`, or `"tool_choice": "none"`. The operator can choose a parser: '
        f"`gpupool set {model} --engine tool-call-parser=NAME`, or a chat template with the "
        f"markup of a parser: `gpupool set {model} --engine chat-template=@FILE`.",
    )
    # Pooling models have no such handlers.
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        name_responses(responses)
        _replace_error(responses, _STORE_VARIABLE, _NO_BACKGROUND)
    vllm_bounds.bound_pooling(state, model_config.max_model_len)
    make_large_answers_apart(state)
    vllm_bounds.limit_beams(state)
    name_as_requested(state.openai_serving_models)
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        name_errors_of_streams(messages)


def _replace_error(maker: Any, part: str, text: str) -> None:
    """Let ``maker`` create errors with ``text`` in place of texts that contain ``part``."""
    create = maker.create_error_response

    def explained(message: str | Exception, *args: Any, **kwargs: Any) -> Any:
        is_meant = isinstance(message, str) and part in message
        return create(text if is_meant else message, *args, **kwargs)

    maker.create_error_response = explained
