"""Markdown and formulas of the chat page, in the browser that shows them: text to DOM."""

import json

import pytest

from tests.clients.scripted import scripted_server
from tests.webui.chromium import Browser, executable


@pytest.fixture(scope="module")
def page():
    if executable() is None:
        pytest.skip("chromium is not installed")
    browser = Browser()
    with scripted_server() as server:
        browser.open(server.url + "/")
        yield browser
    assert browser.console == []
    browser.close()


def shown(page, text):
    """Return the HTML of the nodes that `text` becomes, without the directions of its blocks."""
    html = page.run(
        f"""(async () => {{
          const {{ showMarkdown }} = await import('/webui/markdown.js');
          const into = document.createElement('div');
          showMarkdown(into, {json.dumps(text)});
          return into.innerHTML;
        }})()"""
    )
    return html.replace(' dir="auto"', "")


MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("two\nlines", "<p>two\nlines</p>"),
    ("a\n\nb", "<p>a</p><p>b</p>"),
    ("# T", "<h3>T</h3>"),
    ("###### T #", "<h6>T</h6>"),
    ("#no", "<p>#no</p>"),
    (
        "**b** *i* ***bi*** ~~d~~",
        "<p><strong>b</strong> <em>i</em> <em><strong>bi</strong></em> <del>d</del></p>",
    ),
    ("a_b_c __b__ _i_", "<p>a_b_c <strong>b</strong> <em>i</em></p>"),
    ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
    ("**open", "<p>**open</p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("`a*b*`", "<p><code>a*b*</code></p>"),
    ("`` a`b ``", "<p><code>a`b</code></p>"),
    ("`open", "<p>`open</p>"),
    (r"\*no\* \# \\", r"<p>*no* # \</p>"),
    ("a  \nb", "<p>a  <br>b</p>"),
    ("a<br>b", "<p>a<br>b</p>"),
    (
        "R&amp;D &copy; &#960; &#x3c0; &eacute; a&b &none;",
        "<p>R&amp;D \u00a9 \u03c0 \u03c0 \u00e9 a&amp;b &amp;none;</p>",
    ),
    ("&lt;b&gt; `&amp;`", "<p>&lt;b&gt; <code>&amp;amp;</code></p>"),
    ("H<sub>2</sub>O x<sup>*n*</sup>", "<p>H<sub>2</sub>O x<sup><em>n</em></sup></p>"),
    ("<kbd>Ctrl</kbd> <b>b</b> <sub>", "<p><kbd>Ctrl</kbd> <b>b</b> &lt;sub&gt;</p>"),
    ("<b onclick=x>b</b>", "<p>&lt;b onclick=x&gt;b&lt;/b&gt;</p>"),
    (
        "<details>\n<summary>S *i*</summary>\n\n- a\n\n"
        "<details>\nin\n</details>\n</details>\nafter",
        "<details><summary>S <em>i</em></summary><ul><li>a</li></ul>"
        "<details><summary>Details</summary><p>in</p></details></details><p>after</p>",
    ),
    ("<details open>\nx", '<details open=""><summary>Details</summary><p>x</p></details>'),
    (
        "a[^1] b[^n]\n\n[^1]: One *i*\n[^n]: Two",
        '<p>a<sup>1</sup> b<sup>n</sup></p><p class="footnote"><sup>1</sup> One <em>i</em></p>'
        '<p class="footnote"><sup>n</sup> Two</p>',
    ),
    ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
    ("---", "<hr>"),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("* a\n\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n   - b\n   - c\n2. d", "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>"),
    ("- a\n  b", "<ul><li>a\nb</li></ul>"),
    ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
    ("In\n1984. It", "<p>In\n1984. It</p>"),
    (
        "- [x] a\n- [ ] b",
        '<ul><li class="task">'
        '<input type="checkbox" disabled="" checked="" aria-label="Done"> a</li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="Done"> b</li></ul>',
    ),
    (
        "|a|b|\n|:-:|-:|\n|1|`x\\|y`|",
        '<div class="table" tabindex="0"><table><thead><tr><th class="center">a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td class="center">1</td>'
        '<td class="right"><code>x|y</code></td></tr></tbody></table></div>',
    ),
    ("a | b", "<p>a | b</p>"),
    (
        '[t](https://x.org/a_(b) "T")',
        '<p><a href="https://x.org/a_(b)" target="_blank" rel="noreferrer noopener">t</a></p>',
    ),
    (
        "see https://x.org/a.",
        '<p>see <a href="https://x.org/a" target="_blank" rel="noreferrer noopener">https://x.org/a</a>.</p>',
    ),
    ("[no] (x)", "<p>[no] (x)</p>"),
    # Nothing that a model writes becomes markup, runs, or makes the browser send a request.
    (
        "<b>x</b> <script>alert(1)</script>",
        "<p><b>x</b> &lt;script&gt;alert(1)&lt;/script&gt;</p>",
    ),
    ("[t](javascript:alert(1))", "<p><span>t</span></p>"),
    ("[t](data:text/html,x)", "<p><span>t</span></p>"),
    (
        "![t](https://x.org/p.png)",
        '<p><a href="https://x.org/p.png" target="_blank" rel="noreferrer noopener">t</a></p>',
    ),
]


@pytest.mark.parametrize(("text", "html"), MARKDOWN)
def test_markdown_becomes_elements(page, text, html):
    assert shown(page, text) == html


def test_code_is_colored_and_can_be_copied(page):
    html = shown(page, "```python\nif f(1): # c\n    'x'\n```")
    assert "<span>python</span>" in html
    for kind, text in [("keyword", "if"), ("function", "f"), ("number", "1"), ("comment", "# c")]:
        assert f'<span class="{kind}">{text}</span>' in html
    assert "data-copy=\"if f(1): # c\n    'x'\"" in html


@pytest.mark.parametrize("text", ["```\na", "```py\na\n```", "~~~\na\n~~~", "````\na\n````"])
def test_fences_end_with_their_own_mark_or_the_text(page, text):
    assert ">a</code>" in shown(page, text)


def test_a_stream_keeps_the_nodes_of_blocks_that_do_not_change(page):
    kept = page.run(
        """(async () => {
          const { showMarkdown } = await import('/webui/markdown.js');
          const into = document.createElement('div');
          const text = '# Title\\n\\nfirst *block*\\n\\n- a\\n- b\\n\\nlast $x^2$ end';
          let first = null;
          for (let end = 1; end <= text.length; end += 1) {
            showMarkdown(into, text.slice(0, end));
            if (end === 20) first = into.firstChild;
          }
          const whole = document.createElement('div');
          showMarkdown(whole, text);
          return [first === into.firstChild, whole.innerHTML === into.innerHTML];
        })()"""
    )
    assert kept == [True, True]


@pytest.mark.parametrize(
    "char", ["*", "_", "`", "[", "(", "$", "\\", "<", "#", ">", "- ", "|", "~"]
)
def test_many_marks_take_no_long_time(page, char):
    milliseconds = page.run(
        f"""(async () => {{
          const {{ showMarkdown }} = await import('/webui/markdown.js');
          const start = performance.now();
          showMarkdown(document.createElement('div'), {json.dumps(char)}.repeat(19000));
          return performance.now() - start;
        }})()"""
    )
    assert milliseconds < 20_000  # an hour, if the time grew with the cube of the length


def math(page, tex):
    """Return the MathML of a formula, without attributes."""
    return page.run(
        f"""(async () => {{
          const {{ formula }} = await import('/webui/math.js');
          return formula({json.dumps(tex)}, false).innerHTML.replace(/<(\\w+) [^>]*>/g, '<$1>');
        }})()"""
    )


MATH = [
    ("x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
    ("x^10", "<msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>"),
    ("x_{ij}^2", "<msubsup><mi>x</mi><mrow><mi>i</mi><mi>j</mi></mrow><mn>2</mn></msubsup>"),
    ("f'", "<msup><mi>f</mi><mo>\u2032</mo></msup>"),
    (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
    (r"\frac{a}{b}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"),
    (r"\sqrt[3]{x}", "<mroot><mrow><mi>x</mi></mrow><mrow><mn>3</mn></mrow></mroot>"),
    (r"\alpha\leq\infty", "<mi>\u03b1</mi><mo>≤</mo><mi>∞</mi>"),
    (
        r"\sum_{i=1}^n",
        "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>",
    ),
    (r"\int_0^1", "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>"),
    (r"\mathbb{R}", "<mrow><mi>\u211d</mi></mrow>"),
    (r"\mathbf{A}", "<mrow><mi>\U0001d400</mi></mrow>"),
    (r"\text{if } x", "<mtext>if&nbsp;</mtext><mi>x</mi>"),
    (
        r"\left(\frac{1}{2}\right)",
        "<mrow><mo>(</mo><mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac><mo>)</mo></mrow>",
    ),
    (
        r"\begin{pmatrix}a&b\\c&d\end{pmatrix}",
        "<mrow><mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr>"
        "<mtr><mtd><mi>c</mi></mtd><mtd><mi>d</mi></mtd></mtr></mtable><mo>)</mo></mrow>",
    ),
    (r"\hat{x}", "<mover><mrow><mi>x</mi></mrow><mo>^</mo></mover>"),
    (r"\sin x", "<mi>sin</mi><mi>x</mi>"),
    (r"\unknown x", r"<mtext>\unknown</mtext><mi>x</mi>"),
    ("a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
    ("{a", "<mrow><mi>a</mi></mrow>"),
    ("a}b", "<mi>a</mi><mi>b</mi>"),
    ("^2", "<msup><mrow></mrow><mn>2</mn></msup>"),
    (r"\frac", "<mfrac><mrow></mrow><mrow></mrow></mfrac>"),
    (r"\begin{cases}1", "<mrow><mo>{</mo><mtable><mtr><mtd><mn>1</mn></mtd></mtr></mtable></mrow>"),
]


@pytest.mark.parametrize(("tex", "mathml"), MATH)
def test_formulas_become_mathml(page, tex, mathml):
    assert math(page, tex) == mathml


@pytest.mark.parametrize("text", ["$x$", r"\(x\)", "$$x$$", r"\[x\]", "a $x$ b"])
def test_formulas_are_found_in_text(page, text):
    assert "<mi>x</mi>" in shown(page, text)


@pytest.mark.parametrize("text", ["$5 and $6", "cost $ 5", "$ x $"])
def test_prices_are_no_formulas(page, text):
    assert shown(page, text) == f"<p>{text}</p>"


@pytest.mark.parametrize(
    ("text", "amount"),
    [(r"costs $\$0.60$ or $\$5$ now", "0.60"), (r"$$\$7$$", "7"), (r"$x = \$3$", "3")],
)
def test_an_escaped_dollar_does_not_end_a_formula(page, text, amount):
    assert f"<mtext>$</mtext><mn>{amount}</mn>" in shown(page, text)


def test_a_deep_formula_ends(page):
    assert "<mtext>" in math(page, "{" * 2000)


SUMS = [
    ("1 + 2 * 3", 7),
    ("(1 + 2) * 3", 9),
    ("2^3^2", 512),
    ("-2^2", -4),
    ("2**-1", 0.5),
    ("7 % 4 / 2", 1.5),
    ("sqrt(16) + abs(-1)", 5),
    ("1e3 - .5", 999.5),
    ("cos(pi)", -1),
]


@pytest.mark.parametrize(("text", "value"), SUMS)
def test_expressions_are_calculated(page, text, value):
    script = f"import('/webui/tools.js').then((t) => t.calculate({json.dumps(text)}))"
    assert page.run(script) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "1 +", "(1", "1 2", "alert(1)", "constructor", "sqrt 4", "1..2"]
)
def test_other_expressions_are_refused(page, text):
    given = json.dumps(json.dumps({"expression": text}))
    script = f"import('/webui/tools.js').then((t) => t.runTool('calculate', {given}))"
    assert page.run(script).startswith("Error: ")


def test_indented_code_keeps_its_lines_and_follows_a_blank_line(page):
    code = "document.createElement('div')"
    texts = page.run(
        f"""(async () => {{
          const {{ showMarkdown }} = await import('/webui/markdown.js');
          const into = {code};
          showMarkdown(into, 'a\\n    b\\n\\n    x = 1\\n\\n        y\\n\\nz');
          const text = (e) => e.querySelector('pre')?.textContent ?? e.textContent;
          return [...into.children].map(text);
        }})()"""
    )
    assert texts == ["a\n    b", "x = 1\n\n    y", "z"]


@pytest.mark.parametrize("name", ["align", "align*", "equation", "gather"])
def test_formulas_in_an_environment_need_no_dollars(page, name):
    text = f"A\n\\begin{{{name}}}\na &= b \\\\\n&= c\n\\end{{{name}}}\nB"
    html = shown(page, text)
    assert html.startswith("<p>A</p>")
    assert html.endswith("<p>B</p>")
    assert html.count('<mtable class="aligned"><mtr>') == 1
    assert "</mtr><mtr>" in html
