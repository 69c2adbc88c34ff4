"""The parts of every page: a document without external resources, sections and figures."""

from importlib.resources import files

from .markup import Markup, element, escape


def section(heading: str, *parts: Markup) -> Markup:
    return element("section", element("h2", escape(heading)), *parts)


def collapsible(heading: str, content: Markup) -> Markup:
    return element("details", element("summary", escape(heading)), content)


def figure(picture: Markup, caption: str | None = None) -> Markup:
    below = [element("figcaption", escape(caption))] if caption else []
    return element("figure", element("div", picture, class_="wide"), *below)


def titled_figure(title: str, picture: Markup) -> Markup:
    caption = element("figcaption", escape(title), class_="title")
    return element("figure", caption, element("div", picture, class_="wide"))


def document(title: str, body: Markup) -> str:
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", escape(title)),
        element("style", Markup(style)),
    )
    return "<!DOCTYPE html>\n" + element("html", head, element("body", element("main", body)), lang="en") + "\n"
