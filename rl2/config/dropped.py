"""What rl2 no longer has, with what to use instead."""

# path behind /v1/ -> the answer to an agent
DROPPED_PATHS = {
    "responses": "was dropped; use chat/completions, as agents.OpenAIChatCompletionsModel does",
}
# (last part of the key, value) -> the answer
DROPPED_VALUES = {
    ("optimizer", "adamw_8bit"): (
        "it was dropped; use adamw with offload_optimizer=true, or muon, which has one moment"
    ),
}
