//! tokenizer.json: encode and decode.
use crate::{give, give_text, guard, text};
use std::ffi::c_char;
use std::str::FromStr;
use tokenizers::{AddedToken, Tokenizer};

fn load(json: &str, additions: &str) -> Result<Tokenizer, String> {
    let mut tokenizer = Tokenizer::from_str(json).map_err(|e| e.to_string())?;
    tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
    tokenizer.with_padding(None);
    let mut additions: serde_json::Value = serde_json::from_str(additions).map_err(|e| e.to_string())?;
    let mut tokens: Vec<AddedToken> = serde_json::from_value(additions["tokens"].take()).map_err(|e| e.to_string())?;
    let special: Vec<String> = serde_json::from_value(additions["special"].take()).map_err(|e| e.to_string())?;
    let known = tokenizer.get_added_tokens_decoder();
    for content in special {
        if let Some(token) = tokens.iter_mut().find(|t| t.content == content) {
            token.special = true;
        } else if let Some(token) = known.values().find(|t| t.content == content) {
            // Its stripping flags stay as tokenizer.json has them.
            if !token.special {
                tokens.push(AddedToken {
                    special: true,
                    ..token.clone()
                });
            }
        } else {
            tokens.push(AddedToken::from(content, true));
        }
    }
    tokenizer.add_tokens(tokens).map_err(|e| e.to_string())?;
    Ok(tokenizer)
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_new(p: *const c_char, n: usize, ap: *const c_char, an: usize) -> *mut Tokenizer {
    guard(std::ptr::null_mut(), || {
        Ok(Box::into_raw(Box::new(load(text(p, n)?, text(ap, an)?)?)))
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_free(t: *mut Tokenizer) {
    if !t.is_null() {
        drop(Box::from_raw(t))
    }
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_vocab_size(t: *const Tokenizer) -> i64 {
    guard(-1, || {
        Ok((*t).get_vocab(true).values().max().map_or(0, |id| *id as i64 + 1))
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_token_to_id(t: *const Tokenizer, p: *const c_char, n: usize) -> i64 {
    guard(-1, || Ok((*t).token_to_id(text(p, n)?).map_or(-1, |id| id as i64)))
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_id_to_token(t: *const Tokenizer, id: u32, length: *mut usize) -> *mut c_char {
    guard(std::ptr::null_mut(), || {
        let token = (*t).id_to_token(id).ok_or("no such id")?;
        Ok(give_text(token, length))
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_encode(
    t: *const Tokenizer,
    p: *const c_char,
    n: usize,
    add_special: bool,
    count: *mut usize,
) -> *mut u32 {
    guard(std::ptr::null_mut(), || {
        let encoding = (*t).encode_fast(text(p, n)?, add_special).map_err(|e| e.to_string())?;
        Ok(give(encoding.get_ids().to_vec(), count))
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_tokenizer_decode(
    t: *const Tokenizer,
    ids: *const u32,
    n: usize,
    skip_special: bool,
    length: *mut usize,
) -> *mut c_char {
    guard(std::ptr::null_mut(), || {
        let ids = if n == 0 {
            &[]
        } else {
            std::slice::from_raw_parts(ids, n)
        };
        let decoded = (*t).decode(ids, skip_special).map_err(|e| e.to_string())?;
        Ok(give_text(decoded, length))
    })
}
