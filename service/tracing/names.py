"""Names of OpenTelemetry's semantic conventions (GenAI, HTTP, 2026) and the few of this server's own.

As text, because the constants of the GenAI conventions are deprecated in the package that had them and have no other.
"""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
CHOICES = "gen_ai.request.choice.count"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
TOKEN_USAGE = "gen_ai.client.token.usage"

CHOICE = "ropewalk.choice"
ROPE_SCHEME = "ropewalk.rope.scheme"
ROPE_MODE = "ropewalk.rope.mode"
ROPE_FACTOR = "ropewalk.rope.factor"
ROPE_REROTATIONS = "ropewalk.rope.rerotations"
ROPE_TOKENS = "ropewalk.rope.tokens"

OPERATIONS = {
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
}
"""The routes that have spans, and what the conventions call what they do."""
OWN_PROVIDER = "ropewalk"
