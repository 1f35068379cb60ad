"""instructor: pydantic models by tools, by JSON schema, and as a stream of partial ones."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person of whom something was told."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


QUESTION = [{"role": "user", "content": "Ada is 36 years old. Who is it, and how old?"}]


def main(base_url: str, model: str) -> None:
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(plain, mode=mode)
        person = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            response_model=Person,
            temperature=0,
            max_retries=0,
            max_tokens=128,
        )
        assert isinstance(person, Person), (mode, person)

    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    states = list(
        client.chat.completions.create_partial(
            model=model, messages=QUESTION, response_model=Person, temperature=0, max_tokens=128
        )
    )
    assert states[-1].name is not None, states
    assert states[-1].age is not None, states


if __name__ == "__main__":
    main(*sys.argv[1:])
