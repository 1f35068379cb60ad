"""Send many requests concurrently: the server runs them as one continuous batch."""

import asyncio
import os
import sys

from openai import APIConnectionError, AsyncOpenAI

COUNTRIES = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Greece"]


async def main(base_url: str) -> None:
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        try:
            model = (await client.models.list()).data[0].id
        except APIConnectionError:
            sys.exit(f"no server answers at {base_url}; start one with: quire serve")

        async def ask(country: str) -> str:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
                temperature=0,
            )
            return answer.choices[0].message.content or ""

        for answer in await asyncio.gather(*map(ask, COUNTRIES)):
            print(answer)


base_url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1"
if len(sys.argv) > 1:
    base_url = sys.argv[1]
asyncio.run(main(base_url))
