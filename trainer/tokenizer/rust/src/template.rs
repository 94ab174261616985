//! Chat templates as transformers renders them: trim_blocks, lstrip_blocks, loop controls, no auto-escape, Python
//! string methods, tojson like json.dumps, raise_exception, strftime_now, and {% generation %} as a transparent block.
use crate::pyjson::Style;
use crate::{give_text, guard, text};
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use std::ffi::{c_char, CString};

pub struct Template(Environment<'static>);

fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let bad = |e: String| Error::new(ErrorKind::BadSerialization, e);
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(s) => s.to_string(),
            None => " ".repeat(usize::try_from(v).map_err(|e| bad(e.to_string()))?.min(64)),
        }),
    };
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => <[String; 2]>::try_from(pair)
            .map_err(|_| bad("separators must be two texts".into()))?
            .into(),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let style = Style {
        indent,
        item_separator: item,
        key_separator: key,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let json = serde_json::to_value(&value).map_err(|e| bad(e.to_string()))?;
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(Value::from(out))
}

/// datetime.now().strftime(format): the C library's, as in Python.
fn strftime_now(format: String) -> Result<String, Error> {
    let bad = |e: &str| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
    let c_format = CString::new(format.clone()).map_err(|_| bad("the format holds a zero byte"))?;
    if format.is_empty() {
        return Ok(format);
    }
    let mut buffer = [0u8; 512];
    let written = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut parts).is_null() {
            return Err(bad("no local time"));
        }
        libc::strftime(
            buffer.as_mut_ptr() as *mut c_char,
            buffer.len(),
            c_format.as_ptr(),
            &parts,
        )
    };
    if written == 0 {
        return Err(bad("the result is empty or too long"));
    }
    Ok(String::from_utf8_lossy(&buffer[..written]).into_owned())
}

/// Python's string methods. pycompat's title() is Jinja's filter of that name, which takes a word to begin after a
/// space only; Python's after every character that has no case.
fn python_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) if method == "title" && args.is_empty() => {
            let mut out = String::with_capacity(text.len());
            let mut inside = false;
            for c in text.chars() {
                if inside {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                inside = c.is_lowercase() || c.is_uppercase();
            }
            Ok(Value::from(out))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `{% generation %}` and `{% endgeneration %}` mark the assistant's text for transformers; here they only group.
fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inside = &rest[start + 2..start + length];
        let name = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        out.push_str(&rest[..start + 2]);
        match name {
            "generation" => out.push_str(&inside.replace(name, "if true")),
            "endgeneration" => out.push_str(&inside.replace(name, "endif")),
            _ => out.push_str(inside),
        }
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out + rest
}

/// The message, its line and its causes on one line.
fn explain(e: Error) -> String {
    let mut message = match e.detail() {
        Some(detail) if e.kind() == ErrorKind::InvalidOperation => detail.to_string(),
        Some(detail) => format!("{}: {detail}", e.kind()),
        None => e.kind().to_string(),
    };
    if let Some(line) = e.line() {
        message += &format!(" (template line {line})");
    }
    let mut cause = std::error::Error::source(&e);
    while let Some(inner) = cause {
        message += &format!("; {inner}");
        cause = inner.source();
    }
    message.replace('\n', " ")
}

fn compile(source: &str) -> Result<Template, String> {
    let mut env = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    env.set_syntax(syntax.map_err(explain)?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python_method);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", strftime_now);
    env.add_template_owned("chat", replace_generation_tags(source))
        .map_err(explain)?;
    Ok(Template(env))
}

#[no_mangle]
pub unsafe extern "C" fn rb_template_new(p: *const c_char, n: usize) -> *mut Template {
    guard(std::ptr::null_mut(), || {
        Ok(Box::into_raw(Box::new(compile(text(p, n)?)?)))
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_template_free(t: *mut Template) {
    if !t.is_null() {
        drop(Box::from_raw(t))
    }
}

#[no_mangle]
pub unsafe extern "C" fn rb_template_render(
    t: *const Template,
    p: *const c_char,
    n: usize,
    length: *mut usize,
) -> *mut c_char {
    guard(std::ptr::null_mut(), || {
        let variables: Value = serde_json::from_str(text(p, n)?).map_err(|e| e.to_string())?;
        let rendered = (*t)
            .0
            .get_template("chat")
            .and_then(|t| t.render(variables))
            .map_err(explain)?;
        Ok(give_text(rendered, length))
    })
}

#[allow(dead_code)]
fn handles_are_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Template>();
    check::<tokenizers::Tokenizer>();
}
