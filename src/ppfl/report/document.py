"""What every page is made of: a frame that needs nothing from outside, sections, figures."""

from importlib.resources import files

from .markup import Markup, element, words


def section(heading: str, *parts: Markup) -> Markup:
    return element("section", element("h2", words(heading)), *parts)


def folded(heading: str, content: Markup) -> Markup:
    return element("details", element("summary", words(heading)), content)


def figure(picture: Markup, said: str | None = None) -> Markup:
    caption = [element("figcaption", words(said))] if said else []
    return element("figure", element("div", picture, class_="wide"), *caption)


def titled(title: str, picture: Markup) -> Markup:
    caption = element("figcaption", words(title), class_="title")
    return element("figure", caption, element("div", picture, class_="wide"))


def document(title: str, body: Markup) -> str:
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", words(title)),
        element("style", Markup(style)),
    )
    return "<!DOCTYPE html>\n" + element("html", head, element("body", element("main", body)), lang="en") + "\n"
