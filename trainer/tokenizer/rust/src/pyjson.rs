//! JSON as Python's json.dumps prints it. Hugging Face replaces Jinja's tojson filter by
//! json.dumps(ensure_ascii=False); minijinja's own escapes for HTML and is compact, so prompts with tools would differ.
use serde_json::Value;

pub struct Style {
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

impl Style {
    fn break_line(&self, out: &mut String, level: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    }

    pub fn write(&self, value: &Value, level: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Value::Number(n) if n.is_f64() => out.push_str(&float_repr(n.as_f64().unwrap_or(0.0))),
            Value::Number(n) => out.push_str(&n.to_string()),
            Value::String(s) => self.write_text(s, out),
            Value::Array(items) if items.is_empty() => out.push_str("[]"),
            Value::Object(map) if map.is_empty() => out.push_str("{}"),
            Value::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item_separator);
                    }
                    self.break_line(out, level + 1);
                    self.write(item, level + 1, out);
                }
                self.break_line(out, level);
                out.push(']');
            }
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(b.0));
                }
                out.push('{');
                for (i, (key, item)) in entries.into_iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item_separator);
                    }
                    self.break_line(out, level + 1);
                    self.write_text(key, out);
                    out.push_str(&self.key_separator);
                    self.write(item, level + 1, out);
                }
                self.break_line(out, level);
                out.push('}');
            }
        }
    }

    fn write_text(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
                c if self.ensure_ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units)
                        .iter()
                        .for_each(|u| out.push_str(&format!("\\u{u:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python's repr of a float: shortest digits, exponents from 1e16 up and below 1e-4, at least two exponent digits.
fn float_repr(x: f64) -> String {
    let magnitude = x.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{x:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |d| ('-', d));
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    let text = format!("{x}");
    if text.contains('.') {
        text
    } else {
        text + ".0"
    }
}
