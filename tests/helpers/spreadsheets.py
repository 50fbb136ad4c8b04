"""Small spreadsheets, written by hand as the formats say: cells that a user typed into Excel or LibreOffice."""

import zipfile
from xml.sax.saxutils import escape, quoteattr

NAMESPACE = "http://schemas.openxmlformats.org"
RELATIONS = f"{NAMESPACE}/package/2006/relationships"
OFFICE = f"{NAMESPACE}/officeDocument/2006/relationships"
MAIN = f"{NAMESPACE}/spreadsheetml/2006/main"
ODF = "urn:oasis:names:tc:opendocument:xmlns"


class Raw(str):
    """A cell as the file has it, behind its place."""


def write_xlsx(path, sheets):
    """Sheets by name, each a list of rows of texts, numbers, booleans and None."""
    numbered = list(enumerate(sheets.items()))
    named = "".join(f'<sheet name={quoteattr(name)} sheetId="{i + 1}" r:id="r{i}"/>' for i, (name, _) in numbered)
    links = "".join(f'<Relationship Id="r{i}" Type="{OFFICE}/worksheet" Target="s{i}.xml"/>' for i, _ in numbered)
    book = f'<Relationship Id="b" Type="{OFFICE}/officeDocument" Target="xl/workbook.xml"/>'
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("_rels/.rels", f'<Relationships xmlns="{RELATIONS}">{book}</Relationships>')
        file.writestr("xl/_rels/workbook.xml.rels", f'<Relationships xmlns="{RELATIONS}">{links}</Relationships>')
        workbook = f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}"><sheets>{named}</sheets></workbook>'
        file.writestr("xl/workbook.xml", workbook)
        for i, (_, rows) in numbered:
            lines = "".join(f'<row r="{r}">{_xlsx_row(r, row)}</row>' for r, row in enumerate(rows, start=1))
            sheet = f'<worksheet xmlns="{MAIN}"><sheetData>{lines}</sheetData></worksheet>'
            file.writestr(f"xl/s{i}.xml", sheet)
    return path


def _xlsx_row(number, row):
    cells = ""
    for column, value in enumerate(row):
        place = f'r="{chr(ord("A") + column)}{number}"'
        if isinstance(value, Raw):
            cells += f"<c {place} {value}</c>"
        elif isinstance(value, str):
            cells += f'<c {place} t="inlineStr"><is><t xml:space="preserve">{escape(value)}</t></is></c>'
        elif value is not None:
            kind = "b" if isinstance(value, bool) else "n"
            cells += f'<c {place} t="{kind}"><v>{float(value)!r}</v></c>'
    return cells


def write_ods(path, sheets):
    """As `write_xlsx`, for LibreOffice; a date is written as a text of 10 characters."""
    tables = "".join(
        f"<table:table table:name={quoteattr(name)}>{''.join(map(_ods_row, rows))}</table:table>"
        for name, rows in sheets.items()
    )
    spaces = " ".join(f'xmlns:{name}="{ODF}:{name}:1.0"' for name in ("office", "table", "text"))
    spaces += ' xmlns:calcext="urn:org:documentfoundation:names:experimental:calc:xmlns:calcext:1.0"'
    content = (
        f"<office:document-content {spaces}><office:body><office:spreadsheet>{tables}"
        "</office:spreadsheet></office:body></office:document-content>"
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        file.writestr("META-INF/manifest.xml", f'<manifest:manifest xmlns:manifest="{ODF}:manifest:1.0"/>')
        file.writestr("content.xml", content)
    return path


def _ods_row(row):
    cells = ""
    for value in row:
        if isinstance(value, Raw):
            cells += f"<table:table-cell {value}</table:table-cell>"
        elif value is None:
            cells += "<table:table-cell/>"
        elif isinstance(value, str):
            text = escape(value)
            cells += f'<table:table-cell office:value-type="string"><text:p>{text}</text:p></table:table-cell>'
        else:
            cells += f'<table:table-cell office:value-type="float" office:value="{float(value)!r}"/>'
    return f"<table:table-row>{cells}</table:table-row>"
