"""A strict reader of the HTML that the project writes: tables as rows of texts, and what a browser would fetch."""

from html.parser import HTMLParser

VOID = {"br", "col", "hr", "img", "input", "link", "meta"}


class Page(HTMLParser):
    """Elements must be closed in their order; `tables` are by id, `ids` and `references` in order, `text` is all."""

    def __init__(self, html):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], set()
        self.tables, self.rows, self.text = {}, None, ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes, closed=False):
        given = dict(attributes)
        assert len(given) == len(attributes), f"an attribute of <{tag}> stands there twice"
        self.tags.add(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.references += [given[name] for name in ("href", "xlink:href", "src", "srcset", "data") if name in given]
        assert not any(name.startswith("on") for name in given)
        if tag == "table":
            self.rows = self.tables[given["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.handle_data(" ")
        if tag not in VOID and not closed:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert "svg" in self.open, f"<{tag}/> is of XML"
        self.handle_starttag(tag, attributes, closed=True)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
