"""Anthropic's official client: its list of models, also in pages."""

import asyncio

import anthropic
import pytest

from tests.api.live import live


def test_anthropics_client_lists_models():
    async def main():
        async with live() as server:
            url = f"http://127.0.0.1:{server.port}"
            client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
            async with client:
                found = [model async for model in client.models.list(limit=1)]
                assert [model.id for model in found] == ["tiny", "alias"]
                assert found[0].created_at.year >= 2025
                assert await client.models.retrieve("alias") == found[1]
                with pytest.raises(anthropic.NotFoundError, match="'other' does not exist"):
                    await client.models.retrieve("other")

    asyncio.run(main())
