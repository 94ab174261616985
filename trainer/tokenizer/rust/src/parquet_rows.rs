//! Parquet files as JSON lines, row after row; one row group's pages are in memory at a time.
use crate::{give_text, guard, text};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use std::ffi::c_char;
use std::fs::File;

pub struct ParquetRows {
    rows: i64,
    schema: String,
    iterator: RowIter<'static>,
}

fn open(path: &str) -> Result<ParquetRows, String> {
    let file = File::open(path).map_err(|e| e.to_string())?;
    let reader = SerializedFileReader::new(file).map_err(|e| e.to_string())?;
    let metadata = reader.metadata();
    let rows = metadata.file_metadata().num_rows();
    let columns: Vec<_> = metadata
        .file_metadata()
        .schema()
        .get_fields()
        .iter()
        .map(|field| {
            let kind = if field.is_group() {
                "group".to_string()
            } else {
                field.get_physical_type().to_string()
            };
            serde_json::json!({"name": field.name(), "type": kind})
        })
        .collect();
    let schema = serde_json::Value::from(columns).to_string();
    Ok(ParquetRows {
        rows,
        schema,
        iterator: RowIter::from_file_into(Box::new(reader)),
    })
}

#[no_mangle]
pub unsafe extern "C" fn rb_parquet_open(p: *const c_char, n: usize) -> *mut ParquetRows {
    guard(std::ptr::null_mut(), || Ok(Box::into_raw(Box::new(open(text(p, n)?)?))))
}

#[no_mangle]
pub unsafe extern "C" fn rb_parquet_free(f: *mut ParquetRows) {
    if !f.is_null() {
        drop(Box::from_raw(f))
    }
}

#[no_mangle]
pub unsafe extern "C" fn rb_parquet_rows(f: *const ParquetRows) -> i64 {
    (*f).rows
}

#[no_mangle]
pub unsafe extern "C" fn rb_parquet_schema(f: *const ParquetRows, length: *mut usize) -> *mut c_char {
    guard(std::ptr::null_mut(), || Ok(give_text((*f).schema.clone(), length)))
}

#[no_mangle]
pub unsafe extern "C" fn rb_parquet_next(
    f: *mut ParquetRows,
    max_rows: usize,
    max_bytes: usize,
    length: *mut usize,
) -> *mut c_char {
    guard(std::ptr::null_mut(), || {
        let mut lines = String::new();
        for _ in 0..max_rows {
            match (*f).iterator.next() {
                None => break,
                Some(row) => {
                    lines += &row.map_err(|e| e.to_string())?.to_json_value().to_string();
                    lines.push('\n');
                }
            }
            if lines.len() >= max_bytes {
                break;
            }
        }
        Ok(give_text(lines, length))
    })
}
