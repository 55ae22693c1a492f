"""Requests and answers of a judge behind an OpenAI-compatible API."""


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def question(handler):
    return handler.body["messages"][0]["content"]
