"""mem0: the recipe of docs/guides/retrieval.md, with a chat and embeddings from one address."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "retrieval.md"
WIDTH = 64  # of the vectors of the tiny model


def test_the_recipe_of_the_guide_remembers_and_chats(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (recipe,) = (block for block in blocks if "mem0" in block)
    recipe = recipe.replace("http://127.0.0.1:8000", pair.url).replace("576", str(WIDTH))
    assert pair.url in recipe
    names = {}
    exec(compile(recipe, str(GUIDE), "exec"), names)
    memory = names["memory"]
    (found,) = memory.search("I live by the sea.", filters={"user_id": "ann"})["results"]
    assert found["memory"] == "I live by the sea."
    messages = [{"role": "user", "content": "hi"}]
    assert isinstance(memory.llm.generate_response(messages), str)
