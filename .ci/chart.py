"""Renders the Helm chart of deploy/helm: by helm where it is installed, else by what follows, which knows as much of the template
language as the chart uses (values, if, toYaml, nindent, quote) and refuses the rest."""

import pathlib
import re
import shutil
import subprocess
import tempfile

import yaml


def _value(expression, scope):
    """Of a pipeline: `.Values.image`, `toYaml .Values.resources | nindent 12`."""
    first, *filters = [part.strip() for part in expression.split("|")]
    function, _, path = first.rpartition(" ")
    if not path.startswith(".") or function not in ("", "toYaml"):
        raise ValueError(f"chart: not known to this renderer: {{{{ {expression} }}}}")
    value = scope
    for name in path[1:].split("."):
        value = value[name]
    if function == "toYaml":
        value = yaml.safe_dump(value, default_flow_style=False, width=1000).rstrip("\n")
    for each in filters:
        name, _, argument = each.partition(" ")
        if name == "nindent":
            value = "\n" + "\n".join(" " * int(argument) + line for line in str(value).split("\n"))
        elif name == "quote":
            value = '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
        else:
            raise ValueError(f"chart: not known to this renderer: {each}")
    return value


def render_template(text, scope):
    parts = re.split(r"(\{\{.*?\}\})", text)
    for at in range(1, len(parts), 2):  # a dash takes the white space on its side
        if parts[at].startswith("{{-"):
            parts[at - 1] = parts[at - 1].rstrip()
        if parts[at].endswith("-}}"):
            parts[at + 1] = parts[at + 1].lstrip()
    made, shown = [], [True]
    for part in parts:
        if not part.startswith("{{"):
            made += [part] if all(shown) else []
            continue
        action = part.strip("{}").strip("-").strip()
        if action.startswith("if "):
            shown.append(bool(_value(action[3:], scope)))
        elif action == "end":
            shown.pop()
        elif all(shown):
            made.append(str(_value(action, scope)))
    if shown != [True]:
        raise ValueError("chart: an if has no end")
    return "".join(made)


def render(chart, values):
    """The chart's objects in namespace `shardd`, with `values` in the place of some of values.yaml. And who rendered."""
    chart = pathlib.Path(chart)
    if helm := shutil.which("helm"):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(values, file)
            file.flush()
            command = [helm, "template", "shardd", str(chart), "--namespace", "shardd", "-f", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [each for each in yaml.safe_load_all(text) if each], "helm"
    merged = yaml.safe_load((chart / "values.yaml").read_text())
    for name, value in values.items():
        merged[name] = {**merged[name], **value} if isinstance(value, dict) else value
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    about = {name[0].upper() + name[1:]: value for name, value in described.items()}
    scope = {"Values": merged, "Chart": about, "Release": {"Namespace": "shardd", "Name": "shardd"}}
    texts = [render_template(path.read_text(), scope) for path in sorted((chart / "templates").glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text) if each], "this script"
