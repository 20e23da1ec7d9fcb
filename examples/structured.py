"""Let a running server fill in a JSON schema. usage: structured.py [URL]"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "large": {"type": "boolean"},
    },
    "required": ["city", "continent", "large"],
}

response = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe Paris in JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
)
print(json.loads(response.choices[0].message.content))
