"""Send many requests concurrently: the server runs them as one continuous batch."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

COUNTRIES = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Greece"]


async def main(base_url: str) -> None:
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        model = (await client.models.list()).data[0].id

        async def ask(country: str) -> str:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
                temperature=0,
            )
            return answer.choices[0].message.content or ""

        for answer in await asyncio.gather(*map(ask, COUNTRIES)):
            print(answer)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
